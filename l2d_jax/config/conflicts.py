"""Options that contradict each other. A config with such a pair is refused.

An unused option is no conflict, such as a rank with full copies or a tolerance with a fixed-step solver: variants and
overrides can be combined, and one need not undo the other. A single request is stricter: `requests.check_asked` refuses
an option without effect. Conflicts with devices, data or the model are found where these are known: training checks
budgets and micro-batches, and `check_labels` class labels.
"""

from typing import Any, get_args

from l2d_jax.config.ranges import MOST_PARALLEL, AdaptiveSolver
from l2d_jax.errors import require


def check_conflicts(config: Any) -> None:
    """Raise `InputError` for the first conflict between options of a `Config`."""
    model, path, data, train = config.model, config.path, config.data, config.train
    of_times = (train.own_estimates, train.draws_per_context, train.time_density)
    no_path = f"config.train.method {train.method!r} trains no diffusion path, "
    conflicts = {  # message: whether the config has this conflict
        "config.train.method 'full' trains the LM's weights, which config.model.dtype 'int8' freezes: take bfloat16 or "
        "float32, or the method 'lora'": train.method == "full" and model.dtype == "int8",
        f"{no_path}but config.path.layers {path.layers!r} and config.path.classes {path.classes} ask for one: leave "
        "them out, or set the method to 'l2d'": train.method != "l2d" and (path.layers, path.classes) != ("lora", 0),
        f"{no_path}and config.train.own_estimates {train.own_estimates}, draws_per_context {train.draws_per_context} "
        f"and time_density {train.time_density!r} belong to one: leave them at 0, 1 and "
        "'uniform'": train.method != "l2d" and of_times != (0, 1, "uniform"),
        f"config.train.own_estimates {train.own_estimates} shows estimates of the answer, and config.data.working "
        f"{data.working} the steps before it: set one of them to 0": train.own_estimates > 0 and data.working > 0,
        "config.path.dense_init 'scratch' is for full copies of layers, but config.path.layers 'lora' updates the LM's "
        "own, so there is no from-scratch LoRA: set layers to 'dense' (variant dense_scratch), or dense_init to "
        "'lm'": path.layers == "lora" and path.dense_init == "scratch",
        f"config.path.class_dropout {path.class_dropout} drops classes, but config.path.classes is 0: set both "
        "(variant guidance) or neither": path.classes == 0 and path.class_dropout != type(path).class_dropout,
        "config.data.source 'problems' is built in, but config.data.data_dir is set, which belongs to other sources: "
        "leave it out, or name another source": data.source == "problems" and bool(data.data_dir),
        f"config.data.train_split and config.data.validation_split are both {data.train_split!r}: held-out answers "
        "need a split of their own": data.train_split == data.validation_split,
    }
    for message, is_there in conflicts.items():
        require(not is_there, message)
    check_decoding(config.decode, path)


def check_decoding(decode: Any, path: Any | None) -> None:
    """Raise `InputError` for the first conflict within a `DecodeConfig`, or with a `PathConfig`; None: no path.

    Config files, the Python interface, the server and the evaluation all call this.
    """
    classes, dropout = (0, 0.0) if path is None else (path.classes, path.class_dropout)
    side_by_side = f"config.decode.parallel {decode.parallel!r}"
    latest = 1.0 if path is None else 1 - 1 / path.sigma
    is_adaptive = decode.solver in get_args(AdaptiveSolver)
    conflicts = {  # message: whether the options have this conflict
        f"config.decode.guidance {decode.guidance} is the strength of a class, but config.path.classes is 0: train "
        "with classes (variant guidance), or leave the strength at 1": classes == 0 and decode.guidance != 1,
        f"config.decode.guidance {decode.guidance} mixes in the null class, which is never trained with "
        "config.path.class_dropout 0: raise the dropout, or leave the strength "
        "at 1": classes > 0 and dropout == 0 and decode.guidance != 1,
        f"config.decode.end {decode.end} is later than 1 - 1/sigma = {latest:.9g}, where the adaptive solver "
        f"{decode.solver!r} stops: lower it, or leave it at 1": is_adaptive and latest < decode.end < 1,
        "config.decode.anneal lets config.decode.velocity_temperature fall to 0, but it is 0 already: raise it, or "
        "leave anneal out": decode.anneal and decode.velocity_temperature == 0,
        "config.decode.velocity 'expectation' is the arg max where config.decode.velocity_temperature is 0: raise the "
        "temperature (1 weighs tokens by their probability), or set velocity to "
        "'sample'": decode.velocity == "expectation" and decode.velocity_temperature == 0,
        f"{side_by_side} guesses estimates that are tokens, and config.decode.velocity 'expectation' has "
        "none: set velocity to 'sample', or parallel to "
        "'auto'": decode.must_be_parallel and decode.velocity == "expectation",
        f"{side_by_side} evaluates a grid that is known beforehand, and config.decode.solver "
        f"{decode.solver!r} chooses its steps on the way: take midpoint, or set parallel to "
        "'auto'": decode.must_be_parallel and is_adaptive,
        f"{side_by_side} takes up to {MOST_PARALLEL} evaluations of a token, and config.decode.budget is "
        f"{decode.budget}: lower it, or set parallel to "
        "'auto'": decode.must_be_parallel and decode.budget > MOST_PARALLEL,
    }
    for message, is_there in conflicts.items():
        require(not is_there, message)
