"""Names what a result was computed from by its content, part by part, so that a difference can be told.

A fingerprint holds a hash for each part, such as the weights and the tokenizer of a base. Names, dates and the layout
of files do not count: a base that was moved, or written in other shards, is the same base.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, TypeAlias

from l2d_jax.errors import InputError
from l2d_jax.files import check

Fingerprint: TypeAlias = Mapping[str, str]  # hashes by the name of the part


def digest(value: Any) -> str:
    """The first 128 bits of the SHA-256 of a value that JSON can hold, in 32 hexadecimal digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def changes(recorded: Fingerprint, found: Fingerprint) -> list[str]:
    """A few words for each part that both fingerprints have with another hash."""
    both = [name for name in recorded if name in found]
    return [f"{name} {recorded[name][:8]}, now {found[name][:8]}" for name in both if recorded[name] != found[name]]


def require_same(recorded: Any, found: Fingerprint, *, what: str, remedy: str) -> None:
    """Raise `InputError` if a part of what a file records (nothing, in files of former versions) is another now."""
    changed = [] if recorded is None else changes(check(recorded, dict[str, str], what, remedy=remedy), found)
    if changed:
        raise InputError(f"{what} ({', '.join(changed)}): {remedy}")
