"""The bodies of the operator's requests for paths."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from l2d_jax.config.parsing import from_dict
from l2d_jax.errors import require, shown

NAME, NAME_LENGTH = re.compile(r"[\w.:/-]+", re.ASCII), 128


@dataclass(frozen=True)
class PathBody:
    """The fields of a body of `/v1/paths`."""

    name: str = ""  # what requests call the model with this path
    path: str = ""  # its folder, workdir or hub id


def read_path(values: Any) -> PathBody:
    """Read a body of `/v1/paths`; raises `InputError`."""
    require(isinstance(values, Mapping), f"the body must be a JSON object, got {shown(values)}")
    body = from_dict(PathBody, dict(values), prefix="body")
    check_name(body.name)
    require(body.path != "", "path is missing: give the folder, workdir or hub id of a path")
    return body


def check_name(name: str) -> None:
    """Raise `InputError` for a name that a path cannot have."""
    rule = f"the name of a path has 1 to {NAME_LENGTH} letters, digits and any of . _ : / -"
    require(len(name) <= NAME_LENGTH and NAME.fullmatch(name) is not None, f"{rule}, got {shown(name)}: change it")
