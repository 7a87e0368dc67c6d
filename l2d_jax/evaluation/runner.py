"""Lets a model answer the problems of a task, in batches, and scores the completions."""

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from l2d_jax.data.tokenizer import THOUGHT, next_question, text_ids
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
    loaded: LoadedModel, plan: TaskPlan, open_results: Callable[[], Results], *, run: Run | None = None
) -> dict[str, Any]:
    """Answer and score the problems missing in the results, write each batch when it is done, return all figures."""
    opened: list[Results] = []  # only process 0 scores and writes

    def begin() -> list[str]:
        opened.append(open_results())
        return sorted(opened[0].samples)

    done = set(processes.decide(begin))
    remaining = {number: one for number, one in enumerate(plan.problems) if one.problem.id not in done}
    judged: dict[str, Any] = {"tagged": plan.protocol.tagged, "prompts": plan.protocol.prompts}
    total, grade = len(plan.problems), partial(plan.task.grade, run=run, **judged)
    began, count = time.monotonic(), 0
    with processes.progress_bar(total, plan.task.name, done=total - len(remaining), unit="problem") as shown:
        for batch in _answers(loaded, remaining, plan):
            count += sum(said.tokens for several in batch.values() for said in several)
            if opened:
                opened[0].add(_scored(loaded, remaining, batch, grade, tagged=plan.protocol.tagged))
            shown.update(len(batch))
            if count:  # ranking options generates no token
                shown.set_postfix_str(f"{count / (time.monotonic() - began):.0f} tokens/s")
    seconds = time.monotonic() - began
    speed = {"problems": len(remaining), "tokens": count, "seconds": seconds, "tokens per second": count / seconds}
    speed["batch_size"] = plan.protocol.batch_size
    return dict(processes.decide(lambda: opened[0].finish(speed, counts=plan.counts.record())))


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
        options["stops"] = [end] if (end := next_question(words)) else []
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
