"""Serves a model over HTTP with OpenAI's API and a page: `python -m l2d_jax.serve --workdir DIR --port 8000`.

Each request may choose its budget and other options of decoding. `--model BASE --path math=DIR --path code=DIR` serves
several paths on one language model: the `model` of a request chooses one, and BASE is the language model alone.

With `L2D_JAX_API_KEY` in the environment, requests need that key. With `L2D_JAX_OPERATOR_KEY`, requests with that key
load and drop paths. Ctrl-C or SIGTERM: the server finishes the running requests, for at most --drain seconds, and
exits. A second one exits immediately.
"""

import argparse
import os
import resource

from l2d_jax import command_line, console
from l2d_jax.config import ranges
from l2d_jax.config.choices import DTYPES, WARM_UPS
from l2d_jax.errors import require

KEY, OPERATOR_KEY = "L2D_JAX_API_KEY", "L2D_JAX_OPERATOR_KEY"
SPARE_FILES = 128  # file descriptors that are not for connections


def main() -> None:
    """Parse the command line, load the model, and serve until a signal."""
    options = make_parser().parse_args()
    keys = _read_key(KEY), _read_key(OPERATOR_KEY)
    _allow_files(options.max_connections)
    with console.starting():
        from l2d_jax.programs import serve
    serve.run(options, *keys)


def make_parser() -> command_line.Parser:
    """The options of the program."""
    parser = command_line.Parser("serve", description=__doc__)
    command_line.add_source(parser)
    path = "a path on the language model given by --model: its name for requests, and its folder, workdir or hub id"
    parser.add_argument("--path", action="append", default=[], metavar="NAME=DIR", type=_named_path, help=path)
    parser.add_argument("--dtype", choices=DTYPES, help="type of weights and products")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 is reachable from outside")
    parser.add_argument("--port", type="Port", default=8000, help="port to listen on; 0: any free port")
    lanes = "answers that are decoded at the same time (default: 8; on CPUs 4)"
    parser.add_argument("--lanes", type="Rows", help=lanes)
    parser.add_argument(
        "--queue", type="Count", default=64, help="answers that may wait; further requests get status 429"
    )
    parser.add_argument(
        "--context", type="Tokens", default=2048, help="largest number of tokens of a prompt with its answer"
    )
    cache = "MiB of memory for the beginnings of prompts that were read before; 0: none (default: as many tokens as all"
    cache += " lanes hold, and at most a 16th of the memory)"
    parser.add_argument("--prefix_cache", type="CountOrZero", metavar="MIB", help=cache)
    fixed = "give each answer bit for bit, whatever else is asked; slower, and on one device"
    parser.add_argument("--deterministic", action="store_true", help=fixed)
    parser.add_argument("--timeout", type="Seconds", default=600.0, help="longest time of a request, in seconds")
    parser.add_argument("--max_body", type="Count", default=1024, help="largest body of a request, in KiB")
    budget = "largest budget that a request may ask for (default: 64, or that of the model if it is larger)"
    parser.add_argument("--max_budget", type="Budget", help=budget)
    draws = (
        "most noise samples per token that a request may ask for (default: 16, or those of the model if they are more)"
    )
    parser.add_argument("--max_draws", type="Draws", help=draws)
    efforts = "budgets of OpenAI's reasoning_effort (default: none=1,low=3,medium=7,high=15, where possible)"
    parser.add_argument("--efforts", type=_parse_efforts, metavar="NAME=BUDGET,...", help=efforts)
    limit = "seconds in which a client has to send a request, and to read 64 KiB of a reply"
    parser.add_argument("--client_timeout", type="Seconds", default=15.0, help=limit)
    parser.add_argument("--max_connections", type="Count", default=256, help="largest number of open connections")
    parser.add_argument("--drain", type="Seconds", default=30.0, help="seconds to finish running requests at the end")
    usual = "programs to compile before /health says that the server is ready: those of usual requests, or none"
    parser.add_argument("--warm_up", choices=WARM_UPS, default=WARM_UPS[0], help=usual)
    name = "another name of this server, for requests that use it; *: any name"
    parser.add_argument("--allow_host", action="append", default=[], metavar="NAME", help=name)
    origin = "origin of web pages that may use this server, such as https://chat.example; *: any origin"
    parser.add_argument("--allow_origin", action="append", default=[], metavar="ORIGIN", type=_origin, help=origin)
    return parser


def _parse_efforts(text: str) -> dict[str, int]:
    """Parse NAME=BUDGET,...; raises what argparse reports."""
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name and budget for name, _, budget in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of budgets: write none=1,low=3,high=15")
    return {name: int(command_line.number(ranges.Budget, budget)) for name, _, budget in pairs}


def _named_path(text: str) -> tuple[str, str]:
    """Parse NAME=DIR; raises what argparse reports."""
    name, _, folder = text.partition("=")
    if not (name and folder):
        raise argparse.ArgumentTypeError(f"{text!r} names no path: write math=runs/math")
    return name, folder


def _origin(text: str) -> str:
    """Parse an origin; raises what argparse reports."""
    scheme, _, rest = text.partition("://")
    if text != "*" and not (scheme and rest and "/" not in rest):
        raise argparse.ArgumentTypeError(f"{text!r} is no origin: write it as https://chat.example, without a path")
    return text


def _read_key(name: str) -> str | None:
    """The key in a variable of the environment; raises `InputError` for one that no request can bring."""
    key = os.environ.get(name)
    problem = f"{name} must be visible ASCII characters, and is not" if key else f"{name} is empty"
    is_key = key is None or (key != "" and key.isascii() and key.isprintable() and " " not in key)
    require(is_key, f"{problem}: set a key, or unset it to serve without one")
    return key


def _allow_files(connections: int) -> None:
    """Let this process open the files that these connections need; raises `InputError` where it may not."""
    needed = 2 * connections + SPARE_FILES  # half of them are being refused
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        problem = f"{connections} connections need {needed} file descriptors, and this process may have {hard}"
        require(hard == resource.RLIM_INFINITY or needed <= hard, f"{problem}: lower --max_connections")
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


if __name__ == "__main__":
    command_line.run(main)
