"""Writes the pages of docs/reference that repeat what the code says: `python docs/generate.py`.

`options.md` comes from `l2d_jax/config/schema.py`: the comment of each option is its description. `programs.md` comes
from the command-line parsers. tests/test_reference.py fails while a page is not what this script writes.
"""

import argparse
import ast
import importlib
import inspect
import re
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Interval

from l2d_jax.__main__ import PROGRAMS
from l2d_jax.config import config_file, ranges, schema
from l2d_jax.files import package_table

FOLDER = Path(__file__).parent / "reference"
NOTE = "<!-- Written by docs/generate.py from {source}: change that, and run the script. -->\n"
OPTIONS = """# Options

A config file sets these options, and so does `--config.SECTION.OPTION=VALUE` on the command line of each program that
takes `--config`:

```
l2d train --config smollm2_135m:quickstart --workdir runs/mine --config.train.steps=100 --config.path.sigma=4
```

The defaults are the hyper-parameters of the paper. Write a value as in Python: `3e-4`, `None`, `True`, `"(1, 3, 15)"`.
Text needs no quotes. An unknown name and a value out of range are errors that say what is allowed.
"""
VARIANTS = """
## Variants

A variant is a named set of options. `--config qwen7b:anchored` applies one, `--config qwen7b:anchored,rate_3e5` two.
These variants fit every config. `l2d train --config NAME --variants` lists them, and those of the config.
"""
PROGRAMS_INTRO = """# Programs

`l2d PROGRAM` is the same as `python -m l2d_jax.PROGRAM`. `l2d PROGRAM --help` shows what this page says.

`--config` takes the name of a config that ships with the package, such as `qwen7b`, or the path of a config file, which
has a slash or ends in `.py`. `smollm2_135m:quickstart` adds the variant `quickstart`, and
`l2d train --config smollm2_135m --variants` lists the variants. `--config.SECTION.OPTION=VALUE` overrides an
[option](options.md).

The exit status is 0 when the work is done, 1 after a failed check, and 2 for bad input, with one line that says what to
do. After SIGTERM it is 143, once the state has been saved.
"""


def options_page() -> str:
    """The page of all options: a table for each section of `Config`."""
    parts = [NOTE.format(source="l2d_jax/config/schema.py"), OPTIONS]
    for name, section in typing.get_type_hints(schema.Config).items():
        parts += [f"\n## config.{name}\n\n{' '.join((section.__doc__ or '').split())}\n\n"]
        parts += ["| option | meaning, values and default |\n|---|---|\n"]
        types_of = typing.get_type_hints(section, include_extras=True)
        for option, default, comment in declared(section):
            facts = f"{values(types_of[option])}; default: `{default}`"
            parts.append(f"| `{option}` | {sentence(comment)}<br>*{facts}* |\n")
    parts += [VARIANTS, "\n| variant | what it changes |\n|---|---|\n"]
    for name, variant in package_table(config_file.VARIANTS).items():
        changes = ", ".join(f"`{option}={value!r}`" for option, value in variant["options"].items())
        parts.append(f"| `{name}` | {sentence(variant['says'])}<br>*{changes}* |\n")
    return "".join(parts)


def declared(section: type) -> Iterator[tuple[str, str, str]]:
    """Each option of a section as the source has it: name, default, and the comment behind or above it."""
    lines = inspect.getsource(section).splitlines()
    [body] = ast.parse("\n".join(lines)).body
    assert isinstance(body, ast.ClassDef)
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            line = node.lineno - 1
            behind = lines[line][node.value.end_col_offset :].strip()
            comment = behind or lines[line - 1].strip()
            assert comment.startswith("# "), f"{section.__name__}.{node.target.id} has no comment"
            default = ast.get_source_segment("\n".join(lines), node.value)
            yield node.target.id, str(default), comment.removeprefix("# ")


def sentence(text: str) -> str:
    """A comment as a sentence of a table: with a capital, unless its first word is a name, and a full stop."""
    text = plain(text).replace("|", "\\|")
    first = text.split(maxsplit=1)[0]
    return (text[:1].upper() + text[1:] if re.fullmatch("[a-z-]+[,:]?", first) else text) + (
        "" if text.endswith((".", "?")) else "."
    )


def plain(text: str) -> str:
    """Text for Markdown: outside of code, < and * stand for themselves."""
    parts = text.split("`")
    return "`".join(part if i % 2 else part.replace("<", "&lt;").replace("*", "\\*") for i, part in enumerate(parts))


def values(kind: Any) -> str:
    """The values of a type, in words: "integer from 1 to 4096, or None"."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        [interval] = [mark for mark in parts[1:] if isinstance(mark, Interval)]
        return f"integer {span(interval)}" if parts[0] is int else f"number {span(interval)}"
    if origin is Literal:
        return ", ".join(f"`{value}`" for part in parts for value in (typing.get_args(part) or (part,)))
    if origin in (typing.Union, types.UnionType):
        return ", or ".join(values(part) for part in parts)
    if origin is tuple:
        return f"tuple; each entry: {values(parts[0])}"
    if kind is type(None):
        return "`None`"
    return {str: "text", bool: "`True` or `False`", Mapping: "dictionary"}[origin if origin is not None else kind]


def span(interval: Interval) -> str:
    """An interval in words."""
    end = f"to {shown(interval.le)}" if interval.lt is None else f"to below {shown(interval.lt)}"
    return f"from {shown(interval.ge)} {end}"


def shown(number: Any) -> str:
    """A number as a reader writes it: 65,536 or 1e-6."""
    return f"{number:,}" if isinstance(number, int) else re.sub(r"e([+-])0*", r"e\1", f"{number:g}").replace("e+", "e")


def programs_page() -> str:
    """The page of all programs: what each does, and a table of its options."""
    parts = [
        NOTE.format(source="the parsers of the programs"),
        PROGRAMS_INTRO,
        "\n| program | what it does |\n|---|---|\n",
    ]
    parts += [f"| [`{program}`](#l2d-{program}) | {sentence(says)} |\n" for program, says in PROGRAMS.items()]
    for program in PROGRAMS:
        parser = importlib.import_module(f"l2d_jax.{program}").make_parser()
        parts += [f"\n## l2d {program}\n\n{description(parser)}\n"]
        commands = subcommands(parser)
        if not commands:
            parts += [options_table(parser)]
        for name, (command, summary) in commands.items():
            parts += [f"\n### l2d {program} {name}\n\n{sentence(summary)}\n", options_table(command)]
    return "".join(parts)


def description(parser: argparse.ArgumentParser) -> str:
    """What a parser says of its program, with programs named as on all pages."""
    text = re.sub(r"python -m l2d_jax\.(?=[a-z])", "l2d ", parser.description or "").strip()
    return plain(text)


def subcommands(parser: argparse.ArgumentParser) -> dict[str, tuple[argparse.ArgumentParser, str]]:
    """The parser of each command of a program, and what its help says; empty for most programs."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            return {name: (command, helps.get(name, "")) for name, command in action.choices.items()}
    return {}


def options_table(parser: argparse.ArgumentParser) -> str:
    """A row for each option but `--help`."""
    rows = [row(action) for action in parser._actions if action.dest != "help" and action.help != argparse.SUPPRESS]
    return "\n| option | meaning, values and default |\n|---|---|\n" + "".join(rows)


def row(action: argparse.Action) -> str:
    """The row of an option: its name, whether it has to be given, its help, its values and its default."""
    name = ", ".join(f"`{option}`" for option in action.option_strings) or f"`{action.metavar or action.dest}`"
    facts = []
    if action.required and action.option_strings:
        facts.append("required")
    kind = getattr(ranges, action.type, None) if isinstance(action.type, str) else None
    if action.choices:
        facts.append(", ".join(f"`{choice}`" for choice in action.choices))
    elif kind is not None:
        facts.append(values(kind))
    if action.nargs in ("+", "*"):
        facts.append("one or more" if action.nargs == "+" else "any number")
    elif isinstance(action, argparse._AppendAction):
        facts.append("may be repeated")
    text = (action.help or "").replace(config_file.CONFIG_HELP, "name or path of a config") % {
        **vars(action),
        "prog": "l2d",
    }
    is_plain = action.default not in (None, False, argparse.SUPPRESS) and action.default != []
    if is_plain and action.option_strings and "default" not in text:
        default = action.default if isinstance(action.default, list | tuple) else [action.default]
        facts.append(f"default: {' '.join(f'`{value}`' for value in default)}")
    end = f"<br>*{'; '.join(facts)}*" if facts else ""
    return f"| {name} | {sentence(text)}{end} |\n"


def pages() -> dict[Path, str]:
    """Each generated page by its file."""
    return {FOLDER / "options.md": options_page(), FOLDER / "programs.md": programs_page()}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file, text in pages().items():
        file.write_text(text, encoding="utf-8")
