"""An extension of griffe: the site lists the fields of a class with the comments behind them."""

from typing import Any

import griffe


class Comments(griffe.Extension):
    """Turns the comments of fields, which griffe itself passes over, into a section of the docstring."""

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """Append the fields that have a comment at the end of the line, or on the line above."""
        if cls.docstring is None or "Attributes:" in cls.docstring.value:
            return
        fields = {name: comment_of(field) for name, field in cls.attributes.items() if not name.startswith("_")}
        lines = [f"    {name}: {comment}." for name, comment in fields.items() if comment]
        if lines:
            cls.docstring.value += "\n\nAttributes:\n" + "\n".join(lines)


def comment_of(field: griffe.Attribute | griffe.Alias) -> str:
    """The comment of a field of a class, or an empty text."""
    if field.is_alias or field.annotation is None:
        return ""
    lines = field.lines_collection[field.filepath]
    _, mark, comment = lines[(field.endlineno or 1) - 1].partition("  # ")
    above = lines[(field.lineno or 1) - 2].strip()
    return comment if mark else above.removeprefix("# ") if above.startswith("# ") else ""
