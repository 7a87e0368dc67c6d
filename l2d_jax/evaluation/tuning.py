"""Chooses options on the held-out problems of a plan: for each category, those with the best mean strict score.

Guidance is chosen first, then the options of a token search. Ties go to the values that stand first in the grid, the
defaults. All options are arguments of compiled programs, so no choice compiles anything.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from l2d_jax.data.tokenizer import next_question, require_tokenizer
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.search.beam_search import draw_answer
from l2d_jax.distributed import processes
from l2d_jax.evaluation.answers import answer_plan, plan_prompts, search_plan, searched_text
from l2d_jax.evaluation.held_out import TEMPERATURES, Part
from l2d_jax.evaluation.plan import TaskPlan
from l2d_jax.evaluation.tasks.problem import EncodedProblem, Score

Grade = Callable[..., list[Score]]
Texts = dict[int, str]  # keys: numbers of problems


def tune(loaded: LoadedModel, plan: TaskPlan, grade: Grade) -> dict[str, Any]:
    """Choose options for each category of problems; returns what `results.json` records.

    This is `chosen`, the values by category, and `runs`, the mean strict score of every try, in order. One completion
    of each problem is scored.
    """
    held_out = plan.held_out
    assert held_out is not None
    plan = plan._replace(protocol=dataclasses.replace(plan.protocol, samples=1))
    parts, problems = held_out.parts, held_out.problems
    chosen, runs = dict[str, dict[str, float]](), list[dict[str, Any]]()
    rounds = sum(len(held_out.grid(part)) for part in parts)
    with processes.progress_bar(rounds * len(problems), f"{plan.task.name}, tuning", unit="problem") as shown:
        for category in sorted({one.problem.category for one in problems}):
            some = [one for one in problems if one.problem.category == category]
            values: dict[str, float] = {}
            for part in parts:
                tried = list[tuple[float, dict[str, float]]]()
                for candidate in held_out.grid(part):
                    tried += _try_values(loaded, plan._replace(problems=some), part, values | candidate, grade)
                    shown.update(len(some))
                runs += [{"category": category, **tries, "strict": score} for score, tries in tried]
                values = max(tried, key=lambda one: one[0])[1]
            chosen[category] = values
    return {"chosen": chosen, "runs": runs}


def describe_tuning(plan: TaskPlan, tuning: Mapping[str, Any]) -> Iterator[str]:
    """A line for each category: what was chosen, and its score compared with that of the defaults."""
    assert plan.held_out is not None
    where = f"{plan.held_out.task.name}/{plan.held_out.split}"
    for category, values in tuning["chosen"].items():
        runs = [run for run in tuning["runs"] if run["category"] == category]
        best = max(run["strict"] for run in runs if values.items() <= run.items())
        count = sum(one.problem.category == category for one in plan.held_out.problems)
        shown = ", ".join(f"{name} {value:g}" for name, value in values.items())
        scores = f"strict {best:.3f}, with the defaults {runs[0]['strict']:.3f}"
        yield f"{plan.task.name}: {shown} for {category}: {scores}, on {count} problems of {where}"


def _try_values(
    loaded: LoadedModel, plan: TaskPlan, part: Part, values: dict[str, float], grade: Grade
) -> Iterator[tuple[float, dict[str, float]]]:
    """Yield mean strict scores and values. The searches of one run serve all temperatures of the final choice."""
    tried, encoded = plan.with_values(values), dict(enumerate(plan.problems))
    if part == "guidance":
        texts = {number: said.text for batch in answer_plan(loaded, encoded, tried) for number, [said] in batch.items()}
        yield _strict(texts, plan.problems, grade), values
        return
    ended = search_plan(loaded, plan_prompts(encoded, tried), tried)
    beams = {number: one.beams for batch in ended for number, [one] in batch.items()}
    words = require_tokenizer(loaded.tokenizer)
    end = next_question(words)
    for temperature in TEMPERATURES:
        options: dict[str, Any] = {"seed": plan.protocol.seed, "copy": 0, "temperature": temperature}
        answers = {number: draw_answer(some, number=number, **options).ids for number, some in beams.items()}
        texts = {number: searched_text(ids, words, end=end) for number, ids in answers.items()}
        yield _strict(texts, plan.problems, grade), values | {"final_temperature": temperature}


def _strict(texts: Texts, problems: Sequence[EncodedProblem], grade: Grade) -> float:
    """The mean strict score of completions, judged by process 0."""

    def judge() -> list[float]:
        scores = grade([one.problem for one in problems], [texts[number] for number in range(len(problems))])
        return [score.strict for score in scores]

    return float(np.mean(processes.decide(judge)))
