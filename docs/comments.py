"""An extension of griffe: the comment behind a field of a class is its description on the site."""

from typing import Any

import griffe


class Comments(griffe.Extension):
    """Reads the comments of fields, which griffe itself passes over."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Use the comment at the end of the line, or on the line above, where the field has no docstring."""
        if attr.docstring is None and attr.annotation is not None and attr.parent is not None and attr.parent.is_class:
            lines = attr.lines_collection[attr.filepath]
            _, mark, comment = lines[(attr.endlineno or attr.lineno or 1) - 1].partition("  # ")
            above = lines[(attr.lineno or 1) - 2].strip()
            if not mark and above.startswith("# "):
                comment = above.removeprefix("# ")
            if comment:
                attr.docstring = griffe.Docstring(comment[0].upper() + comment[1:] + ".", parent=attr)
