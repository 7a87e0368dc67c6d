"""Options of several sections, each possible alone, that contradict one another; a config with such is refused.

What is merely unused (a rank beside full copies, a tolerance beside a fixed solver) is no contradiction: variants and
overrides are put together, and one need not undo the other. What depends on the devices, the data or the model is
refused where these are known: budgets and micro-batches by `train.prepare`, class labels by `refine.check_labels`.
"""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from l2d_jax.config.parsing import require

Options = Any  # the sections of a config as attributes


def check(sections: Mapping[str, Any]) -> None:
    """Raise `InputError` for the first contradiction among the sections of a config, by name."""
    options = SimpleNamespace(**sections)
    for contradicts, line in CONTRADICTIONS:
        require(not contradicts(options), line.format(**sections))


# What must not hold, and the line that says so.
CONTRADICTIONS: tuple[tuple[Callable[[Options], bool], str], ...] = (
    (
        lambda o: o.train.method == "full" and o.model.dtype == "int8",
        "config.train.method 'full' trains the LM's weights, which config.model.dtype 'int8' freezes: take bfloat16 or "
        "float32, or the method 'lora'",
    ),
    (
        lambda o: o.train.method != "l2d" and (o.path.layers != "lora" or o.path.classes > 0),
        "config.train.method {train.method!r} trains no diffusion path, but config.path.layers {path.layers!r} and "
        "config.path.classes {path.classes} ask for one of a kind: leave them out, or set the method to 'l2d'",
    ),
    (
        lambda o: (
            o.train.method != "l2d"
            and (o.train.draws_per_context, o.train.time_density, o.train.stratified_times) != (1, "uniform", False)
        ),
        "config.train.method {train.method!r} trains no diffusion path, and config.train.draws_per_context "
        "{train.draws_per_context}, time_density {train.time_density!r} and stratified_times {train.stratified_times} "
        "are of one: leave them at 1, 'uniform' and False",
    ),
    (
        lambda o: o.path.layers == "lora" and o.path.dense_init == "scratch",
        "config.path.dense_init 'scratch' is for full copies of layers, but config.path.layers 'lora' updates the LM's "
        "own, so there is no from-scratch LoRA: set layers to 'dense' (variant dense_scratch), or dense_init to 'lm'",
    ),
    (
        lambda o: o.path.classes == 0 and o.path.class_dropout != type(o.path).class_dropout,
        "config.path.class_dropout {path.class_dropout} drops classes, but config.path.classes is 0: set both (variant "
        "guidance) or neither",
    ),
    (
        lambda o: o.path.classes == 0 and o.decode.guidance != 1,
        "config.decode.guidance {decode.guidance} is the strength of a class, but config.path.classes is 0: train with "
        "classes (variant guidance), or leave the strength at 1",
    ),
    (
        lambda o: o.path.classes > 0 and o.path.class_dropout == 0 and o.decode.guidance != 1,
        "config.decode.guidance {decode.guidance} mixes in the null class, which is never trained with "
        "config.path.class_dropout 0: raise the dropout, or leave the strength at 1",
    ),
    (
        lambda o: o.data.source == "problems" and bool(o.data.subsets or o.data.data_dir),
        "config.data.source 'problems' is built in, but config.data.subsets or config.data.data_dir is set, which are "
        "of other sources: leave them out, or name another source",
    ),
    (
        lambda o: o.data.train_split == o.data.validation_split,
        "config.data.train_split and config.data.validation_split are both {data.train_split!r}: held-out answers need "
        "a split of their own",
    ),
    (
        lambda o: o.decode.anneal and o.decode.velocity_temperature == 0,
        "config.decode.anneal lets config.decode.velocity_temperature fall to 0, but it is 0 already: raise it, or "
        "leave anneal out",
    ),
    (
        lambda o: o.decode.velocity == "expectation" and o.decode.velocity_temperature == 0,
        "config.decode.velocity 'expectation' is the arg max where config.decode.velocity_temperature is 0: raise the "
        "temperature (1 weighs tokens by their probability), or set velocity to 'sample'",
    ),
)
