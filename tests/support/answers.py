"""Comparisons of answers."""

from collections.abc import Iterable


def differing_tokens(found: Iterable[list[int]], wanted: Iterable[list[int]]) -> int:
    """The number of places in which answers differ; places that only one has count too."""
    pairs = zip(found, wanted, strict=True)
    return sum(sum(a != b for a, b in zip(*pair, strict=False)) + abs(len(pair[0]) - len(pair[1])) for pair in pairs)
