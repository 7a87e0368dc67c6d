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
                first = comment.split(maxsplit=1)[0]  # a symbol, such as t, keeps its case
                text = comment if len(first) == 1 and first != "a" else comment[0].upper() + comment[1:]
                attr.docstring = griffe.Docstring(text + ".", parent=attr)
