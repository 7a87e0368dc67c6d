"""Finds a config, applies its variants and the overrides of the command line, and checks the result.

A config is a Python file with `get_config()`. Those of the project ship with the package and are given by a bare name,
such as `qwen7b`. Any other file is given by its path, which has a slash or ends in `.py`.
"""

import ast
import difflib
import importlib.util
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ml_collections import ConfigDict

from l2d_jax.config.parsing import check_value, nearest
from l2d_jax.config.schema import Config
from l2d_jax.errors import LONGEST_LINE, InputError, require, shorten
from l2d_jax.files import check_path, package_table

SHIPPED = Path(__file__).parents[1] / "configs"  # the folder of the configs that ship with the package
VARIANTS = "config/variants.toml"  # of every config file
CONFIG_HELP = (
    "name of a config that ships with the package, such as qwen7b, or path of a config file, with a slash or .py; "
    "NAME:variant or NAME:several,variants adds variants (train --variants lists them); "
    "--config.section.option=value overrides a value"
)


def split_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """Read `--config.a.b=value` or `--config.a.b value` as {"a.b": value}; a value is a Python literal or a string."""
    overrides: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        require(argument.startswith("--config."), f"unknown argument {argument!r} (--help lists the options)")
        name, equals, text = argument.removeprefix("--config.").partition("=")
        if not equals:
            require(len(rest) > 0, f"--config.{name} needs a value: --config.{name}=VALUE")
            text = rest.pop(0)
        try:
            with warnings.catch_warnings(action="ignore"):  # of what looks like Python, and is text
                overrides[name] = ast.literal_eval(text)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            overrides[name] = text
    return overrides


def override_names(overrides: Mapping[str, Any], section: str) -> dict[str, Any]:
    """The overrides of the options of one section, by their names in this section."""
    inside = dict(check_value(overrides.get(section, {}), Mapping[str, Any], f"config.{section}"))
    named = {name: value for name, value in overrides.items() if name.startswith(f"{section}.")}
    return inside | {name.removeprefix(f"{section}."): value for name, value in named.items()}


def read_config(reference: str, overrides: Mapping[str, Any] | None = None) -> Config:
    """Read and check the config `NAME` or `NAME:variant,...`, with overrides by dotted name; raises `InputError`.

    `NAME` is a config of the package or a path, as for `locate_config`. A variant is a function of the file that edits
    what `get_config()` returns, or one of `variants.toml`; they apply in order. A `get_config` that takes an argument
    gets the text behind the colon.
    """
    file, _, variant = reference.partition(":")
    module = _import(locate_config(file))
    try:
        config = _call(module, file, variant)
    except InputError:
        raise
    except Exception as error:  # the file is the user's code: whatever it raises is reported as their line
        raise InputError(f"{file} fails: {type(error).__name__}: {one_line(error)}") from error
    rule = f"{file}: get_config() must return an ml_collections.ConfigDict"
    require(isinstance(config, ConfigDict | Mapping), f"{rule}, got {type(config).__name__}")
    for name, value in (overrides or {}).items():
        _override(config, name, value)
    return Config.from_dict(config.to_dict() if isinstance(config, ConfigDict) else dict(config))


def find_variants(reference: str) -> dict[str, str]:
    """The variants of a config with their descriptions, first those of its file; raises `InputError`."""
    own = _own_variants(_import(locate_config(reference.partition(":")[0])))
    shared = {name: variant["says"] for name, variant in package_table(VARIANTS).items() if name not in own}
    return {name: (f.__doc__ or "").partition("\n")[0] for name, f in own.items()} | shared


def shipped_configs() -> list[str]:
    """The names of the configs that ship with the package, in alphabetical order."""
    return sorted(file.stem for file in SHIPPED.glob("*.py"))


def locate_config(name: str) -> Path:
    """Find the file of a config: `qwen7b` ships with the package, and `configs/qwen7b.py` and `mine.py` are paths.

    Raises `InputError`, with the nearest names, if there is no such config.
    """
    check_path(name, "the config")
    known = shipped_configs()
    if "/" in name or name.endswith(".py"):
        file = Path(name)
        remedy = f"give {file.stem!r} alone, which ships with the package, or" if file.stem in known else "give"
        require(file.is_file(), f"no config file {name}: {remedy} the path of a Python file with get_config()")
        return file
    close = difflib.get_close_matches(name, known, n=3) or known
    question = f"did you mean {' or '.join(close)}?" if len(close) <= 3 else f"choose from {', '.join(close)}"
    place = f"looked for in {shorten(str(SHIPPED), 80)}; the path of your own file has a slash or ends in .py"
    require(name in known, f"no config {name[:40]!r}: {question} ({place})")
    return SHIPPED / f"{name}.py"


def _import(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"l2d_jax_config_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise InputError(f"{file} is not a Python file: a config file ends in .py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"{file} fails: {type(error).__name__}: {one_line(error)}") from error
    problem = f"{file} has no get_config()"
    require(hasattr(module, "get_config"), f"{problem}: define it and return an ml_collections.ConfigDict")
    return module


def _call(module: Any, file: str, variant: str) -> Any:
    if inspect.signature(module.get_config).parameters:
        return module.get_config(variant) if variant else module.get_config()
    config = module.get_config()
    own, shared, owner = _own_variants(module), package_table(VARIANTS), dict[str, str]()
    for name in [name.strip() for name in variant.split(",")] if variant else []:
        if name in own:  # where a run starts, which others may refine
            own[name](config)
            continue
        require(name in shared, f"{file} has no variant {name!r}{nearest(name, own.keys() | shared.keys())}")
        for option, value in shared[name]["options"].items():
            section, _, last = option.partition(".")
            node = getattr(config, section)
            if getattr(node, last) != value and owner.setdefault(option, name) != name:
                both = f"the variants {owner[option]} and {name} both set config.{option}"
                raise InputError(f"{both}: choose one of them")
            setattr(node, last, value)
    return config


def _own_variants(module: ModuleType) -> dict[str, Callable[[Any], None]]:
    """The public functions of a config file except `get_config`."""
    own = {name: f for name, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__}
    return {name: f for name, f in own.items() if name != "get_config" and not name.startswith("_")}


def _override(config: Any, name: str, value: Any) -> None:
    node, done = config, "config"
    for part in name.split("."):
        require(isinstance(node, ConfigDict | dict), f"unknown option {done}.{part}: it is below a plain value")
        require(part in node, f"unknown option {done}.{part}{nearest(part, node.keys())}")
        section, node, done = node, node[part], f"{done}.{part}"
    if isinstance(node, ConfigDict | dict) and value is not None and not isinstance(value, dict):
        raise InputError(f"{done} is a section: set one of {', '.join(sorted(node))} in it")
    section[part] = value


def one_line(error: BaseException) -> str:
    """The message of an error without line breaks; a long one keeps its ends, which say the rule and the remedy."""
    return shorten(" ".join(str(error).split()), LONGEST_LINE)
