"""Generates token ids: a prefill of the prompts, then chunks of tokens until every answer has ended.

The rows of a batch are computed apart: an answer is a function of its prompt, its number, the seed and the settings, up
to rounding, which depends on the shape of the batch (rows, padded length, common prefix). In float32 that changes a
logit by some 1e-5, so that a token changes only where two are as good as equal. In bfloat16 and int8 it may change one
by some tenths, and answers with it.
"""

from collections.abc import Iterator, Sequence

from transformers import PreTrainedTokenizerFast

from l2d_jax.config import ranges
from l2d_jax.config.parsing import check_value, require
from l2d_jax.decoding.lanes import Lanes
from l2d_jax.decoding.refine import check_budget
from l2d_jax.decoding.requests import (
    Answer,
    Piece,
    Request,
    check_decoding_memory,
    check_prompts,
    check_seed,
    class_labels,
)
from l2d_jax.decoding.stop_strings import StopSearch
from l2d_jax.errors import InputError
from l2d_jax.model.l2d import Model

GROUPS = 8  # prompts are read for an eighth of the lanes at a time: later, lanes wait; earlier, reading costs more


def generate_tokens(
    model: Model, request: Request, *, stop_ids: Sequence[int] = (), tokenizer: PreTrainedTokenizerFast | None = None
) -> list[list[int]]:
    """The token ids of each answer, without the stop token; the other prompts change the rounding alone.

    Arguments and errors are those of `decode_lanes`.
    """
    answers: list[list[int]] = [[] for _ in range(len(request.prompts) * request.samples)]
    for pieces in decode_lanes(model, request, stop_ids=stop_ids, tokenizer=tokenizer):
        for piece in pieces:
            answers[piece.answer] += piece.tokens
    return answers


def decode_lanes(
    model: Model,
    request: Request,
    *,
    lanes: int | None = None,
    stop_ids: Sequence[int] = (),
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> Iterator[list[Piece]]:
    """Yield the next few token ids of the answers that are being decoded, until all have ended.

    At most `lanes` of them (None: all) are decoded at a time. One that ends makes room for the next, in the order of
    the prompts, without a new program; longest prompts first takes the least time. One of the `stop_ids` ends an
    answer, and is left out of it; the tokenizer is for stop strings.

    Raises:
      InputError: for an empty prompt, one that leaves no positions for its answer, a budget that the solver or the
        model does not know, an unknown class or token, a stop string that cannot occur; and, once all other answers
        have ended, for those whose logits were not numbers.
    """
    opened, answers = open_lanes(model, request, lanes=lanes, stop_ids=stop_ids, tokenizer=tokenizer)
    count = opened.free
    group, broken = max(1, count // GROUPS), list[int]()
    opened.admit(answers[:count])
    waiting = answers[count:]
    while not opened.is_idle:
        pieces = opened.step()
        broken += [piece.answer for piece in pieces if piece.ending == "broken"]
        yield pieces
        while waiting and opened.free >= min(group, len(waiting)):
            opened.admit(waiting[:group])
            waiting = waiting[group:]
    if broken:
        problem = f"logits of sequences {sorted(broken)} were not numbers, which ended them there"
        if request.restrictions.grammar is not None:
            problem += ", or their response_format became too large"
        raise InputError(f"{problem}: check the weights, or use float32")


def open_lanes(
    model: Model,
    request: Request,
    *,
    lanes: int | None = None,
    stop_ids: Sequence[int] = (),
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> tuple[Lanes, list[Answer]]:
    """Check a request before a prompt is read: lanes for it, at most as many as answers, and the answers.

    Arguments and errors are those of `decode_lanes`.
    """
    prompts, restrictions = request.prompts, request.restrictions
    count = len(prompts) * check_value(request.samples, ranges.Rows, "samples")
    path = None if model.path is None else model.path.config
    chosen = [prompt.settings or request.settings for prompt in prompts] or [request.settings]
    longest, architecture = max(chosen, key=lambda one: one.max_new_tokens), model.llm.architecture
    for one in set(chosen):
        check_budget(one, has_path=path is not None)
        check_prompts([p.ids for p, its in zip(prompts, chosen, strict=False) if its == one], one, architecture)
        require(
            (one.solver, one.velocity, one.draws) == (longest.solver, longest.velocity, longest.draws),
            "prompts that are answered together share solver, velocity and draws: ask for the others apart",
        )
    check_seed(request.seed)
    class_labels(model, prompts)
    stops = StopSearch(restrictions.stops, tokenizer, keeps_stop=restrictions.keeps_stop)
    lanes = min(lanes or count, count)
    group = max(1, lanes // GROUPS)
    tokens = max(len(prompt.ids) for prompt in prompts) - request.prefix
    remedy = "the number of prompts, samples, draws or max_new_tokens"
    rows = lanes + (group if lanes < count else 0)
    check_decoding_memory(model.llm, path, longest, rows=rows, longest=tokens, remedy=remedy)
    reading = model.reading(refines=any(one.budget > 1 for one in chosen))
    require(
        reading.llm is model.llm or all(one.budget > 1 for one in chosen),
        "at a budget of 1 the language model reads the prompt, beyond that this path does: ask for them apart",
    )
    opened = Lanes(reading, lanes=lanes, stop_ids=stop_ids, group=group, known=request)
    grammar = restrictions.grammar
    return opened, [
        Answer(
            place * request.samples + copy,
            prompt,
            settings,
            stops.again(),
            seed=request.seed,
            copy=copy,
            matcher=None if grammar is None else grammar.start(),
        )
        for place, (prompt, settings) in enumerate(zip(prompts, chosen, strict=False))
        for copy in range(request.samples)
    ]
