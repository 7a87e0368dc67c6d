"""L2D in JAX: diffusion finetuning of large language models.

    import l2d_jax
    loaded = l2d_jax.load("runs/quickstart")
    answers = l2d_jax.generate(loaded, [[1, 2, 3]])

The names are imported when they are first used, so that importing a part of the package imports no more than that part.
"""

import importlib
from typing import Any

_HOMES = {
    "load": "loading",
    "generate": "decoding.generation",
    "stream": "decoding.generation",
    "stream_text": "decoding.generation",
    "score": "decoding.likelihood",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
