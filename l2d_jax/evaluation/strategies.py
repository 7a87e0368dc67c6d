"""Ways to spend more compute on an answer, each with its accuracy and its measured cost.

The strategies are: greedy answers at a budget of evaluations per token, the majority of several sampled answers
(self-consistency, Wang et al. 2022), and beam search. The cost is that of the answers' tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import multimode
from typing import Annotated, Any, Literal, NamedTuple

from annotated_types import Interval, Len

from l2d_jax.data.word_problems import final_answer
from l2d_jax.decoding.batching import Completion, complete
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.requests import Request
from l2d_jax.decoding.search.beam_search import search_prompts
from l2d_jax.decoding.search.beams import SearchConfig
from l2d_jax.decoding.stop_strings import to_text
from l2d_jax.distributed import processes
from l2d_jax.files import Count, Positive
from l2d_jax.performance.costs import decoding_flops
from l2d_jax.performance.timing import run_seconds
from l2d_jax.training.held_out.exact_match import MarkedProblems

TEMPERATURE = 0.7  # temperature of the samples for a majority


class Strategy(NamedTuple):
    """How an answer is found; `tries` is the number of samples or beams."""

    kind: Literal["greedy", "majority", "beams"]
    budget: Count
    tries: Count = 1


class Outcome(NamedTuple):
    """The result of a strategy: whether each problem was answered correctly, and the mean cost of an answer."""

    kind: str
    budget: Count
    tries: Count
    right: Annotated[list[bool], Len(1)]
    tokens: Positive  # of all samples or beams, including stop tokens
    flops: Positive  # with the prompt read once
    seconds: Annotated[float, Interval(ge=0, le=1e12)]


def strategies(
    budgets: Sequence[int], samples: Sequence[int], beams: Sequence[int], *, has_path: bool
) -> Iterator[Strategy]:
    """Greedy answers at each budget; majorities and beams at a budget of 1 or, with a path, the smallest above 1."""
    yield from (Strategy("greedy", budget) for budget in (budgets if has_path else (1,)))
    base = min((budget for budget in budgets if budget > 1), default=1) if has_path else 1
    yield from (Strategy("majority", base, tries) for tries in samples)
    yield from (Strategy("beams", base, tries) for tries in beams)


def answer_problems(loaded: LoadedModel, problems: MarkedProblems, strategy: Strategy, *, batch_size: int) -> Outcome:
    """Answer all problems with one strategy, `batch_size` sequences at a time; the beams of a search are sequences."""
    length = problems.most_tokens
    settings = replace(loaded.defaults, budget=strategy.budget, max_new_tokens=length, temperature=0.0)
    right, tokens = [False] * len(problems.prompts), 0
    searched = strategy.tries if strategy.kind == "beams" else 1  # decoded tokens per token of the answer
    with run_seconds() as seconds, processes.progress_bar(len(right), "answers", unit="problem") as shown:
        for answers in _answers(loaded, problems, strategy, settings, batch_size):
            for place, completions in answers.items():
                said = [final_answer(to_text(completion.ids, loaded.tokenizer)) for completion in completions]
                right[place] = majority(said) == problems.wanted[place]
                tokens += searched * sum(completion.tokens for completion in completions)
            shown.update(len(answers))
    read, decode = decoding_flops(loaded.model.llm, loaded.model.path, budget=strategy.budget, draws=settings.draws)
    prompts, count = sum(len(prompt.ids) for prompt in problems.prompts), len(right)
    return Outcome(*strategy, right, tokens / count, (prompts * read + tokens * decode) / count, seconds[0] / count)


def majority(said: Sequence[str | None]) -> str | None:
    """The most frequent answer, the first one if several are; None if there is no answer."""
    return next(iter(multimode(word for word in said if word is not None)), None)


def _answers(
    loaded: LoadedModel, problems: MarkedProblems, strategy: Strategy, settings: Any, batch_size: int
) -> Iterator[dict[int, list[Completion]]]:
    """Yield the answers to a few problems at a time, keyed by place: all samples, or the best beam."""
    tries = strategy.tries
    if strategy.kind == "beams":
        options = {"temperature": 0.0, "max_new_tokens": settings.max_new_tokens}
        config = SearchConfig(beams=tries, candidates=max(2, tries), **options)
        lanes = max(batch_size // tries, 1)
        request = Request(problems.prompts, settings, stop_ids=loaded.stop_ids)
        for ended in search_prompts(loaded.decoder, request, config, lanes=lanes):
            yield {number: [Completion(one.answer, one.tokens)] for number, [one] in ended.items()}
        return
    if strategy.kind == "majority":
        settings = replace(settings, temperature=TEMPERATURE)
    rows = max(batch_size // tries, 1) * tries
    yield from complete(loaded, problems.prompts, settings=settings, batch_size=rows, samples=tries)
