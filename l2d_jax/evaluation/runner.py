"""Asks a model the problems of a task, in batches, and scores what it says."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from l2d_jax.config.parsing import require
from l2d_jax.config.schema import CATEGORIES, DecodeConfig
from l2d_jax.data import tokenizer
from l2d_jax.decoding.batching import Prompt, batches, complete, shared_tokens
from l2d_jax.decoding.generation import FREE, Loaded
from l2d_jax.decoding.likelihood import rank
from l2d_jax.decoding.stop_strings import to_text
from l2d_jax.distributed import processes
from l2d_jax.evaluation.results import Results, sample
from l2d_jax.evaluation.tasks.problem import Problem, Prompts, Run, Score
from l2d_jax.evaluation.tasks.task import Task

Choices = Literal["generate", "likelihood"]


@dataclass(frozen=True)
class Asking:
    """How problems are put to the model, whatever the task."""

    batch_size: int = 16  # sequences at a time
    samples: int | None = None  # completions of each problem; None: as the task has it
    seed: int = 0
    label: int | Literal["category"] | None = None  # class for guidance; "category": that of each problem
    prompts: Prompts = "paper"
    tagged: bool = False  # judge what stands in <answer> tags, or behind </think>
    choices: Choices = "generate"  # or the likeliest letter, by one pass over the prompt
    draws: int = 8  # of noise, for that


class Asked(NamedTuple):
    """A problem with the ids of its prompt."""

    problem: Problem
    ids: list[int]


def settings_for(task: Task, asking: Asking, settings: DecodeConfig, **given: Any) -> tuple[DecodeConfig, int]:
    """Decoding as the task has it where nothing else was `given`, and the number of completions of each problem."""
    usual = task.sampling_for(asking.prompts)
    fields = {
        name: getattr(usual, name) for name in ("max_new_tokens", "temperature", "velocity_temperature", "anneal")
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    return replace(settings, **(fields | chosen)), asking.samples or usual.samples


def label_of(problem: Problem, asking: Asking) -> int | None:
    """The class of a problem for guidance: the number of its category, or the one for all."""
    return CATEGORIES.index(problem.category) if asking.label == "category" else asking.label


def check_asking(asking: Asking, asked: Sequence[Asked]) -> None:
    """Raise `InputError` for a batch that is too small, and for options to rank where there are none."""
    for name in ("batch_size", "draws", "samples"):
        require((getattr(asking, name) or 1) > 0, f"--{name} must be positive, got {getattr(asking, name)}")
    samples = asking.samples or 1
    require(
        asking.batch_size >= samples,
        f"--batch_size {asking.batch_size} does not hold the {samples} samples of a problem: use {samples} or more",
    )
    if asking.choices == "likelihood":
        without = next((one.problem.id for one in asked if not one.problem.options), None)
        require(without is None, f"{without} has no options to rank: use --choices generate")


def evaluate(
    loaded: Loaded,
    task: Task,
    asked: Sequence[Asked],
    open_results: Callable[[], Results],
    *,
    settings: DecodeConfig,
    asking: Asking,
    run: Run | None = None,
) -> dict[str, Any]:
    """Score the problems that the results lack, write each batch as it comes, and return the figures of all.

    Process 0 alone opens the results, scores and writes. Raises `InputError` as `Results`, `generation.stream` and
    `Task.grade` do.
    """
    opened: list[Results] = []

    def begin() -> list[str]:
        opened.append(open_results())
        return sorted(opened[0].samples)

    done = set(processes.decide(begin))
    left = {number: one for number, one in enumerate(asked) if one.problem.id not in done}
    if asking.choices == "likelihood":
        answered = _ranked(loaded, left, settings, asking)
    else:
        shared = shared_tokens([one.ids for one in asked])
        answered = _completed(loaded, left, settings, asking, shared=shared)
    began, count = time.monotonic(), 0
    with processes.progress(len(asked), task.name, done=len(asked) - len(left), unit="problem") as shown:
        for batch in answered:
            count += sum(tokens for _, tokens in batch.values())
            if opened:
                opened[0].add(_scored(loaded, task, left, batch, run=run, tagged=asking.tagged))
            shown.update(len(batch))
            if count:  # options are ranked without writing any
                shown.set_postfix_str(f"{count / (time.monotonic() - began):.0f} tokens/s")
    seconds = time.monotonic() - began
    speed = {"problems": len(left), "tokens": count, "seconds": seconds, "tokens per second": count / seconds}
    return dict(processes.decide(lambda: opened[0].finish(speed)))


Batch = dict[int, tuple[list[str], int]]  # completions by the number of the problem, and how many tokens were written


def _completed(
    loaded: Loaded, asked: dict[int, Asked], settings: DecodeConfig, asking: Asking, *, shared: int
) -> Iterator[Batch]:
    prompts = [Prompt(number, one.ids, label_of(one.problem, asking)) for number, one in asked.items()]
    options = {"batch_size": asking.batch_size, "samples": asking.samples or 1, "seed": asking.seed, "shared": shared}
    for batch in complete(loaded, prompts, settings=settings, restrictions=FREE, **options):
        yield {
            number: ([to_text(ids, loaded.tokenizer) for ids in answers], sum(map(len, answers)))
            for number, answers in batch.items()
        }


def _ranked(loaded: Loaded, asked: dict[int, Asked], settings: DecodeConfig, asking: Asking) -> Iterator[Batch]:
    """The letter whose first token is the likeliest; the options are scored, none is written."""
    numbers = list(asked)
    for batch, places in batches([len(one.ids) for one in asked.values()], asking.batch_size):
        filled = [numbers[place] for place in places]
        labels = [label_of(asked[number].problem, asking) for number in filled]
        found = rank(
            loaded,
            [asked[number].ids for number in filled],
            [_letters(asked[number].problem, loaded) for number in filled],
            settings=settings,
            draws=asking.draws,
            labels=[label for label in labels if label is not None] or None,
            numbers=filled,
            seed=asking.seed,
        )
        best = {n: asked[n].problem.options[int(np.argmax(row))] for n, row in zip(filled, found, strict=True)}
        yield {numbers[place]: ([best[numbers[place]]], 0) for place in batch}


def _letters(problem: Problem, loaded: Loaded) -> list[int]:
    assert loaded.tokenizer is not None
    return [ids[0] for ids in tokenizer.encode(problem.options, loaded.tokenizer)]


def _scored(
    loaded: Loaded, task: Task, asked: dict[int, Asked], batch: Batch, *, run: Run | None, tagged: bool
) -> list[dict[str, Any]]:
    """The lines of a batch; all of its completions are judged together, since running programs takes time."""
    flat = [(number, text) for number, (texts, _) in batch.items() for text in texts]
    problems = [asked[number].problem for number, _ in flat]
    scores: dict[int, list[Score]] = {number: [] for number in batch}
    for (number, _), score in zip(
        flat, task.grade(problems, [text for _, text in flat], run=run, tagged=tagged), strict=True
    ):
        scores[number].append(score)
    return [
        sample(asked[number].problem, to_prompt(asked[number].ids, loaded), texts, scores[number])
        for number, (texts, _) in batch.items()
    ]


def to_prompt(ids: Sequence[int], loaded: Loaded) -> str:
    """A prompt as text, with the template's special tokens."""
    assert loaded.tokenizer is not None
    return str(loaded.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))
