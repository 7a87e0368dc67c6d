"""Lets a model answer the problems of a task, in batches, and scores the completions."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

from l2d_jax.data.tokenizer import THOUGHT
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.distributed import processes
from l2d_jax.evaluation.answers import Answers, answer_plan
from l2d_jax.evaluation.plan import TaskPlan
from l2d_jax.evaluation.results import Results, sample_line
from l2d_jax.evaluation.tasks.problem import EncodedProblem, Run, Score
from l2d_jax.evaluation.tuning import describe_tuning, tune


def evaluate_plan(
    loaded: LoadedModel,
    plan: TaskPlan,
    open_results: Callable[[], Results],
    *,
    run: Run | None = None,
    most: int | None = None,
    spent: Mapping[str, Any] | None = None,
    bar: Any = None,
) -> dict[str, Any]:
    """Answer and score the problems missing in the results, write each batch when it is done, return all figures.

    With `most`, only this number of them, evenly spaced, and the figures are the speed alone: the results are not
    finished. `spent` is the speed of such a call, to which this one is added. `bar` is shown instead of a bar for
    this plan.
    """
    opened: list[Results] = []  # only process 0 scores and writes

    def begin() -> list[str]:
        opened.append(open_results())
        return sorted(opened[0].samples)

    done = set(processes.decide(begin))
    remaining = {number: one for number, one in enumerate(plan.problems) if one.problem.id not in done}
    judged: dict[str, Any] = {"tagged": plan.protocol.tagged, "prompts": plan.protocol.prompts}
    total, grade = len(plan.problems), partial(plan.task.grade, run=run, **judged)
    chosen = None
    if remaining and plan.held_out is not None:
        chosen = _tuned(loaded, plan, opened, partial(plan.held_out.task.grade, run=run, **judged))
    if bar is None:
        bar = processes.progress_bar(total, plan.task.name, done=total - len(remaining), unit="problem")
    if most is not None and most < len(remaining):
        places = list(remaining)
        remaining = {place: remaining[place] for place in (places[i * len(places) // most] for i in range(most))}
    began, count = time.monotonic(), 0
    with bar as shown:
        for batch in _answers(loaded, remaining, plan, chosen):
            count += sum(said.tokens for several in batch.values() for said in several)
            if opened:
                opened[0].add(_scored(loaded, remaining, batch, grade, tagged=plan.protocol.tagged))
            shown.update(len(batch))
            if count:  # ranking options generates no token
                shown.set_postfix_str(f"{count / (time.monotonic() - began):.0f} tokens/s")
    speed = {"problems": len(remaining), "tokens": count, "seconds": time.monotonic() - began}
    speed = {key: value + (spent or {}).get(key, 0) for key, value in speed.items()}
    speed["tokens per second"] = speed["tokens"] / speed["seconds"]
    speed["batch_size"] = plan.protocol.batch_size
    if most is not None:
        return {"speed": speed}
    return dict(processes.decide(lambda: opened[0].finish(speed, counts=plan.counts.record())))


def _tuned(
    loaded: LoadedModel, plan: TaskPlan, opened: Sequence[Results], grade: Callable[..., list[Score]]
) -> dict[str, dict[str, float]]:
    """The values that were chosen for each category: those of the results, or else chosen and recorded now."""
    tuning = processes.decide(lambda: opened[0].tuning)
    if tuning is None:
        tuning = tune(loaded, plan, grade)
        for line in describe_tuning(plan, tuning):
            processes.print_once(line)
        if opened:
            opened[0].record_tuning(tuning)
    return dict(tuning["chosen"])


def _answers(
    loaded: LoadedModel,
    encoded: Mapping[int, EncodedProblem],
    plan: TaskPlan,
    chosen: Mapping[str, Mapping[str, float]] | None,
) -> Iterator[Answers]:
    """The answers to problems; if values were chosen, one category after the other."""
    if chosen is None:
        yield from answer_plan(loaded, encoded, plan)
        return
    for category, values in chosen.items():
        some = {number: one for number, one in encoded.items() if one.problem.category == category}
        yield from answer_plan(loaded, some, plan.with_values(values))


def _scored(
    loaded: LoadedModel,
    encoded: Mapping[int, EncodedProblem],
    batch: Answers,
    grade: Callable[..., list[Score]],
    *,
    tagged: bool,
) -> list[dict[str, Any]]:
    """The sample lines of a batch. Completions are judged together, because running programs takes time."""
    assert loaded.tokenizer is not None
    prompts = {  # with special tokens
        number: str(loaded.tokenizer.decode(encoded[number].ids, clean_up_tokenization_spaces=False))
        for number in batch
    }
    problems = [encoded[number].problem for number, several in batch.items() for _ in several]
    opened = {number: thought_opened(prompt) if tagged else "" for number, prompt in prompts.items()}
    texts = [opened[number] + said.text for number, several in batch.items() for said in several]
    scores = iter(grade(problems, texts))
    return [
        sample_line(encoded[number].problem, prompts[number], several, list(islice(scores, len(several))))
        for number, several in batch.items()
    ]


def thought_opened(prompt: str) -> str:
    """The tag of a thought that a prompt opens, as those of R1 do; an answer that never closes it has no answer."""
    return THOUGHT[0] if prompt.rstrip().endswith(THOUGHT[0]) else ""
