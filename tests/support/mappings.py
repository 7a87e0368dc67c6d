"""Declarations of all kinds, and their tensors under the release's names as a source in memory."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from l2d_jax.model.diffusion_path import DiffusionPath
from l2d_jax.model.llm import LLM
from l2d_jax.weights import mapping
from l2d_jax.weights.mapping import LLM_ROWS, PATH_ROWS, Row
from tests.support import tiny


class Tensors(dict[str, np.ndarray]):
    """A source in memory, which notes what is read."""

    def __init__(self, tensors: Any) -> None:
        super().__init__(tensors)
        self.elements = 0

    @property
    def records(self) -> dict[str, np.ndarray]:
        return self

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        part = self[name][... if index is None else index]
        self.elements += part.size
        return part.copy()


def theirs(tree: Any, rows: list[Row]) -> Tensors:
    return Tensors({name: make() for name, make in mapping.tensors(tree, rows)})


def declarations() -> dict[str, tuple[Any, list[Row]]]:
    found: dict[str, tuple[Any, list[Row]]] = {}
    for kind in tiny.CONFIGS:
        found[f"llm {kind}"] = LLM.declare(tiny.architecture(kind), dtype=jnp.bfloat16), LLM_ROWS
    for kind in ("llama", "qwen"):
        for options in ({}, {"layers": "dense", "reader": "path"}, {"classes": 3}, {"reader": "path"}):
            declared = DiffusionPath.declare(tiny.path_config(**options), tiny.architecture(kind))
            found[f"path {kind} {options}"] = declared, PATH_ROWS
    return found
