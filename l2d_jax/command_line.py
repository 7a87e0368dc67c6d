"""What all programs share at their command line: the config file with its overrides, and one line for bad input."""

import argparse
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import jax

from l2d_jax.config.config_file import one_line, read_config, split_overrides
from l2d_jax.config.schema import Config
from l2d_jax.distributed import processes
from l2d_jax.errors import InputError, RunError


class Parser(argparse.ArgumentParser):
    """An argument parser that reports errors in one line with exit status 2, like all bad input."""

    def error(self, message: str) -> NoReturn:
        """Raise `InputError`."""
        raise InputError(f"{message} (--help lists the options)")

    def parse_with_config(self, arguments: Sequence[str] | None = None) -> tuple[argparse.Namespace, Config]:
        """Parse, and read `--config` with its overrides; raises `InputError`."""
        options, rest = self.parse_known_args(arguments)
        return options, read_config(options.config, split_overrides(rest))


def local_path(text: str) -> Path:
    """Parse the name of a file or folder; refuse a URL, which would become a folder with a colon in its name."""
    if "://" in text:
        remedy = "mount the bucket (Cloud Storage FUSE) or a shared disk, and name the folder"
        raise argparse.ArgumentTypeError(f"{text!r} is not a path of this machine: {remedy}")
    return Path(text)


def run(main: Callable[[], int | None]) -> None:
    """Exit with what `main` returns, or with one line on standard error: 2 for bad input, 1 for a run that stopped.

    If one process of several fails alone, it must not wait for the others, which may be waiting for it.
    """
    together = False
    try:
        status = main() or 0
        together = True
    except (InputError, RunError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        status, together = 2 if isinstance(error, InputError) else 1, isinstance(error, processes.SharedError)
    except KeyboardInterrupt:
        status = 130
    except Exception:
        if not jax.distributed.is_initialized():
            raise
        traceback.print_exc()
        status = 1
    processes.leave(status, together=together)
    sys.exit(status)
