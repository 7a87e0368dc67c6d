"""L2D in JAX: diffusion finetuning of large language models.

    import l2d_jax
    loaded = l2d_jax.load("runs/quickstart")
    answers = l2d_jax.generate(loaded, [[1, 2, 3]])

The names are imported when they are first used, so that importing a part of the package imports no more than that part.
"""

from typing import Any

__all__ = ["generate", "load", "stream", "stream_text"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from l2d_jax import generation

        return getattr(generation, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
