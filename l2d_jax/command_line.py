"""What all programs share at their command line: types of options, the config file, one line for what goes wrong.

A program is a file of this folder. It has the parser (`make_parser`) and `main`, which parses, and only then imports
what does the work from `l2d_jax.programs`. `--help` and a mistyped option therefore wait for no large library.
"""

import argparse
import contextlib
import errno
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn, cast, get_args, get_origin

from l2d_jax import console
from l2d_jax.config import ranges
from l2d_jax.config.config_file import one_line, read_config, split_overrides
from l2d_jax.config.parsing import check_value
from l2d_jax.config.schema import Config
from l2d_jax.errors import LONGEST_LINE, InputError, RunError, SharedError, require, shorten
from l2d_jax.files import check_path, check_text
from l2d_jax.storage import mirror
from l2d_jax.weights import hub

TRACEBACK = "L2D_JAX_TRACEBACK"  # set: errors of the program's own show where they were raised


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line; `type="Budget"` is a number in the range `ranges.Budget`.

    `Parser("train", description=...)` is the parser of a program. Its usage shows the command that the user gave:
    `python -m l2d_jax.train` or `l2d train`.
    """

    def __init__(self, program: str | None = None, **options: Any) -> None:
        if program is not None:
            is_subcommand = sys.argv[0].endswith(f" {program}")  # as `l2d_jax.__main__` writes it
            options["prog"] = sys.argv[0] if is_subcommand else f"python -m l2d_jax.{program}"
        super().__init__(**options)
        for name, declared in vars(ranges).items():
            if get_origin(declared) is Annotated:
                self.register("type", name, partial(number, declared))

    def error(self, message: str) -> NoReturn:
        """Raise `InputError`."""
        raise InputError(f"{shorten(message, 200)} (--help lists the options)")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does; raises `InputError` for arguments that are no text."""
        arguments = sys.argv[1:] if args is None else list(args)
        for number, argument in enumerate(arguments, 1):
            check_text(argument, f"argument {number}")
        return super().parse_known_args(arguments, namespace)

    def parse_with_config(self) -> tuple[argparse.Namespace, Config]:
        """Parse, and read `--config` with its overrides, which the options keep as such; raises `InputError`."""
        options, rest = self.parse_known_args()
        options.overrides = split_overrides(rest)
        return options, read_config(options.config, options.overrides)


def number(declared: Any, text: str) -> int | float:
    """Parse a number of a declared range, such as `ranges.Budget`; raises what argparse reports."""
    value: Any = text
    with contextlib.suppress(ValueError):  # which the check reports, with the type that is wanted
        value = get_args(declared)[0](text)
    return cast(int | float, _reported(lambda: check_value(value, declared, "the number")))


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add `--workdir` and `--model`, one of which names the model, and `--tokenizer` and `--chat_template`."""
    source = parser.add_mutually_exclusive_group(required=True)
    workdir = "a workdir, whose newest checkpoint is used, or the hub id of a published path"
    source.add_argument("--workdir", type=_workdir, action=_Workdir, help=workdir)
    model = "a model folder, a hub id or a GGUF file; a model without a path has a budget of 1"
    source.add_argument("--model", type=model_name, help=model)
    parser.add_argument("--tokenizer", type=model_name, help="folder or hub id of another tokenizer")
    template = "a .jinja file, folder or hub id with another chat template; base_llama: the release's for base models"
    parser.add_argument("--chat_template", type=model_name, help=template)


def add_search(parser: argparse.ArgumentParser, *, temperature: str, has_total: bool = True) -> None:
    """Add the options of token search; candidates are sampled at `temperature`, in words.

    `has_total` adds `--total_budget`, for programs that split a budget between beams.
    """
    group = parser.add_argument_group("search over tokens, for the best of several answers")
    group.add_argument("--beams", type="Beams", help="number of beams; each beam costs the whole budget")
    if has_total:
        total = "evaluations per token for all beams together, instead of --budget; each beam gets an equal share"
        group.add_argument("--total_budget", type="Count", nargs="+", help=total)
    candidates = f"tokens sampled to extend a beam, at {temperature}"
    group.add_argument("--candidates", type="Count", help=candidates)
    group.add_argument("--length_power", type="Power", help="a beam's score is divided by its tokens to this power")
    group.add_argument(
        "--repetition_penalty", type="Nats", help="nats that a repeated trigram takes from a beam's score"
    )
    final = "temperature for sampling the answer among the final beams, in units of the score; 0: the best beam"
    group.add_argument("--final_temperature", type="Temperature", help=final)


def tokenizer_options(options: argparse.Namespace, config: Config | None = None) -> dict[str, Any]:
    """The arguments of `loading.find` and `load` for `--tokenizer` and `--chat_template`.

    What they leave out is as the `config` has it, except for a workdir, which has what it was trained with.
    """
    given = {name: getattr(options, name) for name in ("tokenizer", "chat_template")}
    if config is None or options.workdir:
        return given
    return {name: value or getattr(config.model, name) for name, value in given.items()}


def _workdir(text: str) -> Path | str:
    return text if hub.is_on_hub(model_name(text)) else folder_or_bucket(text)


class _Workdir(argparse.Action):
    """Puts a hub id, whose repository must have a path, in the place of `--model`."""

    def __call__(self, *given: Any) -> None:
        """Called by argparse; raises `InputError` for a repository without a path."""
        from l2d_jax import loading  # these take seconds to import, and only a hub id needs them
        from l2d_jax.weights import locate

        _, namespace, value, *_ = given
        if isinstance(value, str):
            has_path = loading.has_path(locate.locate(value, files=hub.TEXT_FILES))
            require(has_path, f"{value} has no diffusion path: give a language model by --model")
        setattr(namespace, "model" if isinstance(value, str) else "workdir", value)


def local_path(text: str) -> Path:
    """Parse the name of a file or folder of this machine; refuse a URL."""
    if "://" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not a path of this machine: copy it here, and name the copy")
    return Path(model_name(text))


def folder_or_bucket(text: str) -> Path:
    """Parse the name of a folder of this machine or in a bucket, gs://BUCKET/FOLDER, whose small files are fetched."""
    return _reported(lambda: mirror.open_folder(model_name(text)))


def model_name(text: str) -> str:
    """Parse a folder, a hub id or a file, or another text that becomes a part of a path."""
    _reported(lambda: check_path(text, "the name"))
    _reported(lambda: require(text != "", "the name is empty: give one"))
    return text


def file_name(text: str) -> str:
    """Parse the name of a file within a folder that another option names; refuse one that leads out of it."""
    if "/" in text or "\\" in text or text.startswith("."):
        raise argparse.ArgumentTypeError(f"{text!r} is no name of a file: leave out slashes and the leading dot")
    return model_name(text)


def run(main: Callable[[], int | None]) -> None:
    """Exit with what `main` returns, or with one line on standard error: 2 for bad input, 1 for a run that stopped.

    If one process of several fails alone, it must not wait for the others, which may be waiting for it.
    """
    together = False
    with console.interruptible() as pressed:
        try:
            status = main() or 0
            mirror.publish_all()
            together = True
        except SystemExit as end:  # after --help
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except KeyboardInterrupt:
            status = console.INTERRUPTED
        except Exception as error:
            together = isinstance(error, SharedError)
            status = console.INTERRUPTED if pressed else _report(error)
    status = console.finish(status)
    if processes := sys.modules.get("l2d_jax.distributed.processes"):  # not imported: this process is the only one
        processes.leave(status, together=together)
    sys.exit(status)


def _report(error: Exception) -> int:
    """Print one line for an error; the exit status."""
    if isinstance(error, BrokenPipeError) and console.is_cut_off():
        return console.CUT_OFF
    if os.environ.get(TRACEBACK) and not isinstance(error, InputError | RunError):
        traceback.print_exc()
    status, text = 1, one_line(error)
    if isinstance(error, InputError):
        status = 2
    elif isinstance(error, OSError) and error.strerror and not isinstance(error, BrokenPipeError):
        may_pass = error.filename is None or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO)
        text = error.strerror + ("" if error.filename is None else f": {shorten(str(error.filename), 200)}")
        status = 1 if may_pass else 2
    elif not isinstance(error, RunError):
        text = f"{type(error).__name__}: {shorten(text, 180)} (internal; {TRACEBACK}=1 shows where)"
    console.complain(shorten(f"error: {mirror.shown_places(text)}", LONGEST_LINE))
    return status


def _reported(check: Callable[[], Any]) -> Any:
    """The result of a check, whose `InputError` argparse reports with the option's name."""
    try:
        return check()
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
