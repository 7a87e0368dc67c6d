"""Traces some of a run's steps for TensorBoard, as `config.profile.steps` says.

Each host writes `<workdir>/profile/plugins/profile/steps_10_12/<host>.xplane.pb`, where the profile plugin looks:
`tensorboard --logdir <workdir>/profile`.
"""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

import jax

from l2d_jax.config.schema import ProfileConfig
from l2d_jax.distributed import processes
from l2d_jax.errors import InputError

Step: TypeAlias = Callable[..., tuple[Any, Any]]  # (state, ...) -> (state, metrics), as `step.make_step` makes it


def check_steps(config: ProfileConfig, steps: int) -> None:
    """Raise `InputError` if a traced step lies beyond the run's last."""
    if config.steps is not None and _traced(config.steps)[-1] > steps:
        raise InputError(
            f"config.profile.steps {config.steps} goes beyond the run's {steps} steps: choose earlier ones"
        )


def trace_steps(run_step: Step, config: ProfileConfig, workdir: Path, *, start: int) -> Step:
    """`run_step` for the steps after `start`, tracing the steps that `config` names.

    The first step of a process compiles, so a run that resumes with the steps to trace, or after them, traces nothing.
    """
    if config.steps is None:
        return run_step
    traced = _traced(config.steps)
    if traced[0] <= start + 1:
        first = f"step {start + 2} is the first that can be traced from here"
        processes.print_once(f"no trace of the steps {config.steps}: {first}")
        return run_step
    numbers = count(start + 1)
    options = jax.profiler.ProfileOptions()
    options.session_id = f"steps_{traced[0]}_{traced[-1]}"  # one folder for all hosts, whatever their clocks say
    options.python_tracer_level = 0  # millions of calls of Python would hide, and slow, the rest

    def run(*arguments: Any) -> tuple[Any, Any]:
        step = next(numbers)
        if step == traced[0]:
            jax.block_until_ready(arguments)  # earlier steps may still be under way
            jax.profiler.start_trace(workdir / "profile", profiler_options=options)
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            results = run_step(*arguments)
        if step == traced[-1]:
            jax.block_until_ready(results)
            jax.profiler.stop_trace()
            shown = f"tensorboard --logdir {workdir / 'profile'}"
            processes.print_once(f"trace of steps {traced[0]} to {traced[-1]}: {shown}")
        return results

    return run


def _traced(steps: str) -> range:
    return range(*map(int, steps.split(":")))
