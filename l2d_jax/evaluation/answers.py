"""Answers the problems of a plan, a few at a time: with completions, with searches, or with the likeliest letter."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from l2d_jax.data.tokenizer import next_question, require_tokenizer, text_ids
from l2d_jax.decoding.batching import common_prefix, complete, plan_batches
from l2d_jax.decoding.generation import broken_logits
from l2d_jax.decoding.likelihood import rank
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.requests import Prompt, Request
from l2d_jax.decoding.search.beam_search import SearchResult, search_prompts
from l2d_jax.decoding.stop_strings import to_text
from l2d_jax.evaluation.plan import TaskPlan, label_of
from l2d_jax.evaluation.results import Said
from l2d_jax.evaluation.tasks.problem import EncodedProblem

Answers = dict[int, list[Said]]  # keys: numbers of problems


def answer_plan(loaded: LoadedModel, encoded: Mapping[int, EncodedProblem], plan: TaskPlan) -> Iterator[Answers]:
    """Yield the answers to problems of a plan, batch by batch; the keys of `encoded` are the numbers of the problems.

    If logits of some problems are NaN, raises `InputError` after all others are answered.
    """
    protocol, words = plan.protocol, require_tokenizer(loaded.tokenizer)
    if protocol.choices == "likelihood":
        yield from _rank_letters(loaded, encoded, plan)
        return
    prompts, end = plan_prompts(encoded, plan), next_question(words)
    if plan.search is not None:
        for results in search_plan(loaded, prompts, plan):
            yield {
                number: [
                    Said(searched_text(one.answer, words, end=end), one.tokens, one.evaluations, one.passes)
                    for one in several
                ]
                for number, several in results.items()
            }
        return
    options: dict[str, Any] = {name: getattr(protocol, name) for name in ("batch_size", "samples", "seed")}
    options["stops"] = [end] if end else []
    for completed in complete(loaded, prompts, settings=plan.settings, prefix=_prefix(plan), **options):
        yield {
            number: [Said(to_text(one.ids, words), one.tokens, one.evaluations, one.passes) for one in several]
            for number, several in completed.items()
        }


def searched_text(ids: Sequence[int], words: PreTrainedTokenizerFast, *, end: str) -> str:
    """The text that a search has found, up to `end` (`next_question`), where a search cannot stop."""
    text = to_text(ids, words)
    return text.split(end, 1)[0] if end else text


def search_plan(
    loaded: LoadedModel, prompts: Sequence[Prompt], plan: TaskPlan
) -> Iterator[dict[int, list[SearchResult]]]:
    """Search for the answers of a plan that has a search, as `search_prompts` does."""
    assert plan.search is not None
    seed, samples = plan.protocol.seed, plan.protocol.samples
    request = Request(prompts, plan.settings, seed, samples, _prefix(plan), stop_ids=loaded.stop_ids)
    return search_prompts(loaded.decoder, request, plan.search, lanes=plan.lanes)


def plan_prompts(encoded: Mapping[int, EncodedProblem], plan: TaskPlan) -> list[Prompt]:
    """The prompts of numbered problems, with the class that the plan gives each."""
    return [Prompt(number, one.ids, label_of(one.problem, plan.protocol)) for number, one in encoded.items()]


def _prefix(plan: TaskPlan) -> int:
    return common_prefix([one.ids for one in plan.problems])


def _rank_letters(loaded: LoadedModel, encoded: Mapping[int, EncodedProblem], plan: TaskPlan) -> Iterator[Answers]:
    """Yield the letter whose first token is most likely for each problem."""
    protocol, prompts, words = plan.protocol, plan_prompts(encoded, plan), require_tokenizer(loaded.tokenizer)
    letters, broken = [one.problem.options for one in encoded.values()], list[int]()
    for batch, rows in plan_batches([len(prompt.ids) for prompt in prompts], protocol.batch_size):
        ranked = Request([prompts[row] for row in rows], plan.settings, protocol.seed)
        tokens = [[ids[0] for ids in text_ids(letters[row], words)] for row in rows]
        found = dict(zip(rows, rank(loaded.model, ranked, tokens, draws=protocol.draws), strict=True))
        good = [row for row in batch if not np.isnan(found[row]).any()]
        broken += [prompts[row].number for row in batch if row not in good]
        yield {prompts[row].number: [Said(letters[row][int(np.argmax(found[row]))])] for row in good}
    if broken:
        raise broken_logits(broken)
