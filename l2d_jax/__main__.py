"""The command `l2d PROGRAM ...`, which is also `python -m l2d_jax PROGRAM ...`; without a program it lists them."""

import importlib
import sys
from pathlib import Path

import l2d_jax
from l2d_jax import command_line, console
from l2d_jax.config.parsing import nearest
from l2d_jax.errors import require, shorten

PROGRAMS = {  # in the order in which a user needs them
    "prepare": "tokenise and pack the training data once, for many runs",
    "train": "finetune a diffusion path, or the language model itself; the same command again resumes",
    "generate": "answer a prompt, or chat",
    "serve": "serve a model over HTTP, with OpenAI's API and a page",
    "evaluate": "score a model on the paper's tasks",
    "sweep": "evaluate at several budgets, and draw the paper's figures",
    "study": "compare several models on the same held-out answers",
    "report": "show what runs have measured, as tables and as a page",
    "convert": "import a model, export one for other programs, or publish one on the hub",
    "verify": "compare a model with the numbers of another implementation",
    "benchmark": "measure the speed of training and decoding on this machine",
    "compile": "compile for a TPU slice without one: does it fit, and how fast is it?",
}


def main() -> None:
    """Run the program that the command line names; exits with its status, or with 2 for a name that is unknown."""
    console.begin()
    command_line.run(_main)


def _main() -> int | None:
    command = "l2d" if Path(sys.argv[0]).name == "l2d" else "python -m l2d_jax"
    name, *rest = sys.argv[1:] or ["--help"]
    if name in ("--help", "-h", "help"):
        width = max(map(len, PROGRAMS))
        print(f"usage: {command} PROGRAM [OPTION ...]\n\nL2D in JAX: diffusion finetuning of language models\n")
        print("programs:")
        print("".join(f"  {program:<{width}}  {what}\n" for program, what in PROGRAMS.items()))
        print(f"{command} PROGRAM --help lists the options of a program; {command} --version prints the version")
        return 0
    if name == "--version":
        print(f"l2d_jax {l2d_jax.__version__}")
        return 0
    question = nearest(name, PROGRAMS)
    require(name in PROGRAMS, f"no program {shorten(name, 40)!r}{question} ({command} --help lists them)")
    sys.argv = [f"{command} {name}", *rest]  # as the program's usage shows it
    status: int | None = importlib.import_module(f"l2d_jax.{name}").main()
    return status


if __name__ == "__main__":
    main()
