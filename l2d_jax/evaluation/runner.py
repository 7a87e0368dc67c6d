"""Puts the problems of a task to a model, in batches, and scores the completions."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Literal

import numpy as np

from l2d_jax.config.parsing import require
from l2d_jax.config.schema import CATEGORIES, DecodeConfig
from l2d_jax.data.tokenizer import text_ids
from l2d_jax.decoding.batching import common_prefix, complete, plan_batches
from l2d_jax.decoding.likelihood import rank
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.requests import Prompt
from l2d_jax.decoding.stop_strings import to_text
from l2d_jax.distributed import processes
from l2d_jax.evaluation.results import Results, sample_line
from l2d_jax.evaluation.tasks.problem import EncodedProblem, Problem, Prompts, Run, Score
from l2d_jax.evaluation.tasks.task import Task


@dataclass(frozen=True)
class EvaluationProtocol:
    """How problems are put to the model, whatever the task."""

    batch_size: int = 16  # sequences at a time
    samples: int | None = None  # completions of each problem; None: the task's number
    seed: int = 0
    label: int | Literal["category"] | None = None  # class for guidance; "category": each problem's own
    prompts: Prompts = "paper"
    tagged: bool = False  # judge only what stands in <answer> tags, or behind </think>
    choices: Literal["generate", "likelihood"] = "generate"  # "likelihood": the likeliest letter, by one pass
    draws: int = 8  # noise samples for the likelihood


def label_of(problem: Problem, protocol: EvaluationProtocol) -> int | None:
    """The class for guidance of a problem: the number of its category, or the label that all problems share."""
    return CATEGORIES.index(problem.category) if protocol.label == "category" else protocol.label


def check_protocol(protocol: EvaluationProtocol, encoded: Sequence[EncodedProblem]) -> None:
    """Raise `InputError` for a batch below the samples of a problem, and for ranking a problem without options."""
    samples = protocol.samples or 1
    require(
        protocol.batch_size >= samples,
        f"--batch_size {protocol.batch_size} does not hold the {samples} samples of a problem: use {samples} or more",
    )
    if protocol.choices == "likelihood":
        without = next((one.problem.id for one in encoded if not one.problem.options), None)
        require(without is None, f"{without} has no options to rank: use --choices generate")


def evaluate_task(
    loaded: LoadedModel,
    task: Task,
    encoded: Sequence[EncodedProblem],
    open_results: Callable[[], Results],
    *,
    settings: DecodeConfig,
    protocol: EvaluationProtocol,
    run: Run | None = None,
) -> dict[str, Any]:
    """Score the problems that the results lack, write each batch as it finishes, and return the figures of all.

    Process 0 alone opens the results, scores and writes. Raises `InputError` as `Results`, `stream_tokens` and
    `Task.grade` do.
    """
    opened: list[Results] = []

    def begin() -> list[str]:
        opened.append(open_results())
        return sorted(opened[0].samples)

    done = set(processes.decide(begin))
    remaining = {number: one for number, one in enumerate(encoded) if one.problem.id not in done}
    prefix = common_prefix([one.ids for one in encoded])
    began, count = time.monotonic(), 0
    with processes.progress_bar(len(encoded), task.name, done=len(encoded) - len(remaining), unit="problem") as shown:
        for batch in _answers(loaded, remaining, settings, protocol, prefix=prefix):
            count += sum(tokens for _, tokens in batch.values())
            if opened:
                opened[0].add(_scored(loaded, remaining, batch, partial(task.grade, run=run, tagged=protocol.tagged)))
            shown.update(len(batch))
            if count:  # ranking options generates no token
                shown.set_postfix_str(f"{count / (time.monotonic() - began):.0f} tokens/s")
    seconds = time.monotonic() - began
    speed = {"problems": len(remaining), "tokens": count, "seconds": seconds, "tokens per second": count / seconds}
    speed["batch_size"] = protocol.batch_size
    return dict(processes.decide(lambda: opened[0].finish(speed)))


# The completions of each problem by its number, and how many tokens were generated for them.
Answers = dict[int, tuple[list[str], int]]


def _answers(
    loaded: LoadedModel,
    encoded: Mapping[int, EncodedProblem],
    settings: DecodeConfig,
    protocol: EvaluationProtocol,
    *,
    prefix: int,
) -> Iterator[Answers]:
    """Answer problems, batch by batch: with completions, or with the letter whose first token is the likeliest."""
    words = loaded.tokenizer
    assert words is not None
    prompts = [Prompt(number, one.ids, label_of(one.problem, protocol)) for number, one in encoded.items()]
    if protocol.choices == "generate":
        for completed in complete(
            loaded,
            prompts,
            settings=settings,
            batch_size=protocol.batch_size,
            samples=protocol.samples or 1,
            seed=protocol.seed,
            prefix=prefix,
        ):
            yield {
                number: ([to_text(ids, words) for ids in answers], sum(map(len, answers)))
                for number, answers in completed.items()
            }
        return
    options = [one.problem.options for one in encoded.values()]
    for batch, rows in plan_batches([len(prompt.ids) for prompt in prompts], protocol.batch_size):
        found = rank(
            loaded.model,
            [prompts[row] for row in rows],
            [[ids[0] for ids in text_ids(options[row], words)] for row in rows],
            settings=settings,
            draws=protocol.draws,
            seed=protocol.seed,
        )
        best = {row: options[row][int(np.argmax(shares))] for row, shares in zip(rows, found, strict=True)}
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
