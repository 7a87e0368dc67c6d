"""L2D in JAX: diffusion finetuning of large language models.

    import l2d_jax
    model = l2d_jax.load("runs/quickstart")
    model.generate("What is 12 * 4?", budget=15)

`load` opens a workdir of training, a model folder or a plain language model, and returns a `LoadedModel` with
`generate`, `stream`, `score` and `trace`. `parse_tool_calls` reads calls of tools in an answer. Bad input raises
`InputError`, and a run that cannot go on raises `RunError`.
These names are imported when they are first used: `import l2d_jax` alone imports neither JAX nor another large library.
`l2d --help`, or `python -m l2d_jax`, lists the programs.
"""

import importlib
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from l2d_jax.decoding.loaded_model import LoadedModel as LoadedModel
    from l2d_jax.decoding.tools.call_reader import parse_tool_calls as parse_tool_calls
    from l2d_jax.errors import InputError as InputError
    from l2d_jax.errors import RunError as RunError
    from l2d_jax.loading import load as load

_HOMES = {"load": "loading", "LoadedModel": "decoding.loaded_model", "InputError": "errors", "RunError": "errors"}
_HOMES |= {"parse_tool_calls": "decoding.tools.call_reader"}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*_HOMES, "__doc__", "__version__"]


def _version() -> str:
    """The version that `pyproject.toml` declares: the file itself in a clone, else the installed package's metadata."""
    declared = Path(__file__).parents[1] / "pyproject.toml"
    if declared.is_file():
        project = importlib.import_module("tomllib").loads(declared.read_text("utf-8")).get("project", {})
        if project.get("name") == __name__:
            return str(project["version"])
    return str(importlib.import_module("importlib.metadata").version(__name__))


def _is_wanted(record: logging.LogRecord) -> bool:
    """Whether a record of transformers is shown: all but the advice to install PyTorch, which nothing here needs."""
    return not record.msg.startswith("PyTorch was not found") if isinstance(record.msg, str) else True


logging.getLogger("transformers").addFilter(_is_wanted)

# Whether `python -m l2d_jax` or `python -m l2d_jax.PROGRAM` is about to run: until then, Python's name for it is "-m".
if sys.argv[:1] == ["-m"] and any(word.removeprefix("-m").partition(".")[0] == __name__ for word in sys.orig_argv):
    importlib.import_module(f"{__name__}.console").begin()
