"""Traces of the steps of `config.profile.steps`, which show where the time of a step goes.

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
from l2d_jax.errors import require

Step: TypeAlias = Callable[..., tuple[Any, Any]]  # (state, ...) -> (state, metrics), as `step.make_step` makes it


def check_steps(config: ProfileConfig, steps: int) -> None:
    """Raise `InputError` if a traced step is after the run's last step."""
    problem = f"config.profile.steps {config.steps} goes beyond the run's {steps} steps"
    require(config.steps is None or _traced(config.steps)[-1] <= steps, f"{problem}: choose earlier ones")


def trace_steps(run_step: Step, config: ProfileConfig, workdir: Path, *, start: int) -> Step:
    """Wrap `run_step` so that it traces the steps of `config`, unless the first of them compiles or is over.

    The run continues after step `start`.
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
    options.python_tracer_level = 0  # millions of Python calls would slow and hide the rest

    def run(*arguments: Any) -> tuple[Any, Any]:
        step = next(numbers)
        if step == traced[0]:
            jax.block_until_ready(arguments)  # earlier steps may still be running
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
