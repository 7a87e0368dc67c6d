"""Lets a model answer the problems of a task, in batches, and scores the completions."""

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from l2d_jax.data.tokenizer import text_ids
from l2d_jax.decoding.batching import common_prefix, complete, plan_batches
from l2d_jax.decoding.generation import broken_logits
from l2d_jax.decoding.likelihood import rank
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.requests import Prompt, Request
from l2d_jax.decoding.stop_strings import to_text
from l2d_jax.distributed import processes
from l2d_jax.evaluation.plan import TaskPlan, label_of
from l2d_jax.evaluation.results import Results, Said, sample_line
from l2d_jax.evaluation.tasks.problem import EncodedProblem, Run, Score


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
    total, grade = len(plan.problems), partial(plan.task.grade, run=run, tagged=plan.protocol.tagged)
    if bar is None:
        bar = processes.progress_bar(total, plan.task.name, done=total - len(remaining), unit="problem")
    if most is not None and most < len(remaining):
        places = list(remaining)
        remaining = {place: remaining[place] for place in (places[i * len(places) // most] for i in range(most))}
    began, count = time.monotonic(), 0
    with bar as shown:
        for batch in _answers(loaded, remaining, plan):
            count += sum(said.tokens for several in batch.values() for said in several)
            if opened:
                opened[0].add(_scored(loaded, remaining, batch, grade))
            shown.update(len(batch))
            if count:  # ranking options generates no token
                shown.set_postfix_str(f"{count / (time.monotonic() - began):.0f} tokens/s")
    speed = {"problems": len(remaining), "tokens": count, "seconds": time.monotonic() - began}
    speed = {key: value + (spent or {}).get(key, 0) for key, value in speed.items()}
    speed["tokens per second"] = speed["tokens"] / speed["seconds"]
    speed["batch_size"] = plan.protocol.batch_size
    if most is not None:
        return {"speed": speed}
    return dict(processes.decide(lambda: opened[0].finish(speed)))


Answers = dict[int, list[Said]]  # keys: numbers of problems


def _answers(loaded: LoadedModel, encoded: Mapping[int, EncodedProblem], plan: TaskPlan) -> Iterator[Answers]:
    """Answer problems batch by batch: with completions, or with the letter whose first token is most likely.

    If logits of some problems are NaN, raises `InputError` after all others are answered.
    """
    protocol, settings, words = plan.protocol, plan.settings, loaded.tokenizer
    assert words is not None
    prompts = [Prompt(number, one.ids, label_of(one.problem, protocol)) for number, one in encoded.items()]
    if protocol.choices == "generate":
        prefix = common_prefix([one.ids for one in plan.problems])
        options: dict[str, Any] = {name: getattr(protocol, name) for name in ("batch_size", "samples", "seed")}
        for completed in complete(loaded, prompts, settings=settings, prefix=prefix, **options):
            yield {
                number: [Said(to_text(one.ids, words), one.tokens, one.evaluations, one.passes) for one in several]
                for number, several in completed.items()
            }
        return
    letters, broken = [one.problem.options for one in encoded.values()], list[int]()
    for batch, rows in plan_batches([len(prompt.ids) for prompt in prompts], protocol.batch_size):
        ranked = Request([prompts[row] for row in rows], settings, protocol.seed)
        tokens = [[ids[0] for ids in text_ids(letters[row], words)] for row in rows]
        found = dict(zip(rows, rank(loaded.model, ranked, tokens, draws=protocol.draws), strict=True))
        good = [row for row in batch if not np.isnan(found[row]).any()]
        broken += [prompts[row].number for row in batch if row not in good]
        yield {prompts[row].number: [Said(letters[row][int(np.argmax(found[row]))])] for row in good}
    if broken:
        raise broken_logits(broken)


def _scored(
    loaded: LoadedModel, encoded: Mapping[int, EncodedProblem], batch: Answers, grade: Callable[..., list[Score]]
) -> list[dict[str, Any]]:
    """The sample lines of a batch. Completions are judged together, because running programs takes time."""
    assert loaded.tokenizer is not None
    problems = [encoded[number].problem for number, several in batch.items() for _ in several]
    scores = iter(grade(problems, [said.text for several in batch.values() for said in several]))
    lines = []
    for number, several in batch.items():
        problem, ids = encoded[number]
        prompt = str(loaded.tokenizer.decode(ids, clean_up_tokenization_spaces=False))  # with special tokens
        lines.append(sample_line(problem, prompt, several, list(islice(scores, len(several)))))
    return lines
