"""The choices of command-line options, and the defaults that their help shows.

The code behind a choice may need a large library. A command line needs only its name, and reads it here.
"""

from typing import get_args

from l2d_jax.config.ranges import AdaptiveSolver, FixedSolver
from l2d_jax.files import package_table

FIXED_SOLVERS = get_args(FixedSolver)
ADAPTIVE_SOLVERS = get_args(AdaptiveSolver)
SOLVER_NAMES = (*FIXED_SOLVERS, *ADAPTIVE_SOLVERS)
DTYPES = ("float32", "bfloat16", "int8")  # of weights and products, where a command line names one
WARM_UPS = ("usual", "none")  # programs that `serve` compiles before it is ready
# options of token search that need --beams
SEARCH_OPTIONS = ("candidates", "length_power", "repetition_penalty", "final_temperature")
TUNED_OPTIONS = SEARCH_OPTIONS[1:]  # those that `evaluate --tune search` chooses
TUNED_PROBLEMS = 32  # held-out problems of each category on which `evaluate --tune` chooses options
EXPORT_FORMATS = ("l2d", "l2d-full", "hf", "peft")
LIKELIHOOD_DRAWS = 8  # noise samples for the likelihood of a choice
VERIFIED_TOKENS = 512  # tokens of each row that is compared with transformers' model
VERIFIED_PATH_TOKENS = 32  # tokens of the row that is compared with the path in PyTorch


def task_names() -> list[str]:
    """The tasks of `evaluate`, the paper's first."""
    return list(package_table("evaluation/tasks/tasks.toml"))


def suite_tasks() -> dict[str, list[str]]:
    """The tasks of each suite of `evaluate`."""
    suites = package_table("evaluation/suites.toml")
    return {name: [task for tasks in suite.values() for task in tasks] for name, suite in suites.items()}


def tpu_names() -> list[str]:
    """The kinds of TPUs that `compile` knows."""
    return list(package_table("performance/topologies.toml")["generations"])
