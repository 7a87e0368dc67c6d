"""Puts the problems of a task to a model, in batches, and scores the completions."""

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from l2d_jax.data.tokenizer import text_ids
from l2d_jax.decoding.batching import common_prefix, complete, plan_batches
from l2d_jax.decoding.likelihood import rank
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.requests import Prompt, Request
from l2d_jax.decoding.stop_strings import to_text
from l2d_jax.distributed import processes
from l2d_jax.evaluation.plan import TaskPlan, label_of
from l2d_jax.evaluation.results import Results, sample_line
from l2d_jax.evaluation.tasks.problem import EncodedProblem, Run, Score


def evaluate_plan(
    loaded: LoadedModel, plan: TaskPlan, open_results: Callable[[], Results], *, run: Run | None = None
) -> dict[str, Any]:
    """Score the problems that the results lack, write each batch as it finishes, and return the figures of all."""
    opened: list[Results] = []  # by process 0, which alone scores and writes

    def begin() -> list[str]:
        opened.append(open_results())
        return sorted(opened[0].samples)

    done = set(processes.decide(begin))
    remaining = {number: one for number, one in enumerate(plan.problems) if one.problem.id not in done}
    total, grade = len(plan.problems), partial(plan.task.grade, run=run, tagged=plan.protocol.tagged)
    began, count = time.monotonic(), 0
    with processes.progress_bar(total, plan.task.name, done=total - len(remaining), unit="problem") as shown:
        for batch in _answers(loaded, remaining, plan):
            count += sum(tokens for _, tokens in batch.values())
            if opened:
                opened[0].add(_scored(loaded, remaining, batch, grade))
            shown.update(len(batch))
            if count:  # ranking options generates no token
                shown.set_postfix_str(f"{count / (time.monotonic() - began):.0f} tokens/s")
    seconds = time.monotonic() - began
    speed = {"problems": len(remaining), "tokens": count, "seconds": seconds, "tokens per second": count / seconds}
    speed["batch_size"] = plan.protocol.batch_size
    return dict(processes.decide(lambda: opened[0].finish(speed)))


# The completions of each problem by its number, and how many tokens were generated for them.
Answers = dict[int, tuple[list[str], int]]


def _answers(loaded: LoadedModel, encoded: Mapping[int, EncodedProblem], plan: TaskPlan) -> Iterator[Answers]:
    """Answer problems, batch by batch: with completions, or with the letter whose first token is the likeliest."""
    protocol, settings, words = plan.protocol, plan.settings, loaded.tokenizer
    assert words is not None
    prompts = [Prompt(number, one.ids, label_of(one.problem, protocol)) for number, one in encoded.items()]
    if protocol.choices == "generate":
        prefix = common_prefix([one.ids for one in plan.problems])
        options: dict[str, Any] = {name: getattr(protocol, name) for name in ("batch_size", "samples", "seed")}
        for completed in complete(loaded, prompts, settings=settings, prefix=prefix, **options):
            told = {number: [to_text(ids, words) for ids in answers] for number, answers in completed.items()}
            yield {number: (texts, sum(map(len, completed[number]))) for number, texts in told.items()}
        return
    letters = [one.problem.options for one in encoded.values()]
    for batch, rows in plan_batches([len(prompt.ids) for prompt in prompts], protocol.batch_size):
        ranked = Request([prompts[row] for row in rows], settings, protocol.seed)
        tokens = [[ids[0] for ids in text_ids(letters[row], words)] for row in rows]
        found = rank(loaded.model, ranked, tokens, draws=protocol.draws)
        best = {row: letters[row][int(np.argmax(shares))] for row, shares in zip(rows, found, strict=True)}
        yield {prompts[row].number: ([best[row]], 0) for row in batch}


def _scored(
    loaded: LoadedModel, encoded: Mapping[int, EncodedProblem], batch: Answers, grade: Callable[..., list[Score]]
) -> list[dict[str, Any]]:
    """The sample lines of a batch, whose completions are judged together, since running programs takes time."""
    assert loaded.tokenizer is not None
    problems = [encoded[number].problem for number, (texts, _) in batch.items() for _ in texts]
    scores = iter(grade(problems, [text for texts, _ in batch.values() for text in texts]))
    lines = []
    for number, (texts, _) in batch.items():
        problem, ids = encoded[number]
        prompt = str(loaded.tokenizer.decode(ids, clean_up_tokenization_spaces=False))  # with special tokens
        lines.append(sample_line(problem, prompt, texts, list(islice(scores, len(texts)))))
    return lines
