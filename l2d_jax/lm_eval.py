"""Runs tasks of EleutherAI's lm-evaluation-harness: `python -m l2d_jax.lm_eval --workdir DIR --tasks piqa --out DIR`.

Prompts, few-shot examples, metrics, the printed table and the files in `--out` are the harness's. What is not listed
here is an option of its own program (`lm_eval run --help`), such as --apply_chat_template or --include_path DIR.
"""

from l2d_jax import command_line
from l2d_jax.data.tokenizer import first_line
from l2d_jax.decoding.solver import ADAPTIVE, SOLVERS
from l2d_jax.errors import InputError

HARNESS = ("tasks", "num_fewshot", "limit", "batch_size")  # options that it takes as they are


def main() -> None:
    """Parse the command line, and hand it to the harness, which opens the model."""
    parser = command_line.Parser(prog="python -m l2d_jax.lm_eval", description=__doc__)
    command_line.add_source(parser)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "int8"], help="of weights and products")
    parser.add_argument("--tasks", required=True, help="names of tasks and groups of them, with commas between them")
    parser.add_argument("--out", type=command_line.folder_or_bucket, required=True, help="a folder for the results")
    parser.add_argument("--limit", type="Count", help="use the first N examples of each task; None: all")
    parser.add_argument("--num_fewshot", type="CountOrZero", help="examples before each question; None: the task's")
    asking = parser.add_argument_group("decoding and likelihoods")
    asking.add_argument("--budget", type="Budget", help="evaluations of the path per token; 1: the base model")
    asking.add_argument("--solver", choices=SOLVERS, help="how the path is integrated")
    asking.add_argument("--tolerance", type="Tolerance", help=f"of each step of {', '.join(ADAPTIVE)}")
    asking.add_argument("--likelihood", choices=["path", "base"], default="path", help="base: the language model alone")
    asking.add_argument("--draws", type="SeveralDraws", default=8, help="noise samples for each likelihood")
    asking.add_argument("--max_new_tokens", type="Tokens", help="the longest answer, in tokens; None: the task's")
    asking.add_argument("--batch_size", type="Rows", default=16, help="sequences at a time, on all devices together")
    asking.add_argument("--seed", type="Seed", default=0, help="of the noise and of the sampled tokens")
    options, rest = parser.parse_known_args()
    try:
        from lm_eval._cli.run import Run
        from lm_eval.api.registry import register_model

        from l2d_jax.evaluation.lm_eval_model import LmEvalModel
    except ImportError as error:
        raise InputError(f"lm-evaluation-harness cannot be imported ({error}): pip install '.[lm-eval]'") from None
    register_model("l2d")(LmEvalModel)
    harness = command_line.Parser(prog="python -m l2d_jax.lm_eval")
    Run.create(harness.add_subparsers())
    asked = harness.parse_args(["run", *rest])
    given = {name: value for name, value in vars(options).items() if value is not None}
    vars(asked).update({name: given.pop(name) for name in HARNESS if name in given})
    vars(asked).update(model="l2d", output_path=str(given.pop("out")), log_samples=True)
    asked.model_args = {"model": str(given.pop("workdir", None) or given.pop("model")), **given}
    try:
        asked.func(asked)
    except InputError:
        raise
    except (ValueError, FileNotFoundError) as error:  # a task is a program of its own, and reads its data from anywhere
        raise InputError(f"the harness cannot run {options.tasks}: {first_line(error)}") from error


if __name__ == "__main__":
    command_line.run(main)
