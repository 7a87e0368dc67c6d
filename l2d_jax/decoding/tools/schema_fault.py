"""Finds the part of a JSON schema that a grammar cannot follow."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

OF_NAMES = ("properties", "patternProperties", "$defs", "definitions")  # keys whose values map names to schemas
OF_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")  # keys whose values are lists of schemas
OF_ONE = ("items", "additionalProperties")  # keys whose values are schemas
SHARED = ("$defs", "definitions")  # keys to which references of all parts point


def find_fault(schema: Mapping[str, Any], problem_of: Callable[[Any], str | None]) -> tuple[str, str] | None:
    """The place of the innermost part that cannot be followed, and the problem; None if the schema can be followed.

    A place is like "properties.when.items". `problem_of` says what is wrong with a schema, or None.
    """
    problem = problem_of(schema)
    if problem is None:
        return None
    shared = {key: schema[key] for key in SHARED if key in schema}
    place, part, is_inside = list[str](), schema, True
    while is_inside:
        is_inside = False
        for name, inner in _parts(part):
            found = problem_of({**shared, **inner})
            if found is not None and (found == problem or "nsatisfiable" in problem):
                place, part, problem, is_inside = [*place, name], inner, found, True
                break
    return ".".join(place), problem


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The schemas directly in a schema, with their places."""
    for key, value in schema.items():
        inner: list[tuple[str, Any]] = [(key, value)] if key in OF_ONE else []
        if key in OF_NAMES and isinstance(value, Mapping):
            inner = [(f"{key}.{name}", one) for name, one in value.items()]
        elif key in OF_LISTS and isinstance(value, list):
            inner = [(f"{key}[{number}]", one) for number, one in enumerate(value)]
        yield from ((name, one) for name, one in inner if isinstance(one, Mapping))
