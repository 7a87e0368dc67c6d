"""Generates token ids: a prefill of the prompts, then chunks of tokens until every answer has ended.

The rows of a batch are computed independently. So an answer is a function of its prompt, its number, the seed and the
settings, up to rounding. Rounding depends on the shape of the batch (rows, padded length, common prefix). In float32 it
changes a logit by about 1e-5, and a token only where two tokens are practically tied. In bfloat16 and int8 it can
change a logit by some tenths, and so change answers.
"""

import itertools
from collections.abc import Iterable, Iterator

from l2d_jax.config import ranges
from l2d_jax.config.parsing import check_value
from l2d_jax.config.schema import PathConfig
from l2d_jax.decoding import requests
from l2d_jax.decoding.batch.lanes import Lanes
from l2d_jax.decoding.memory import check_decoding_memory
from l2d_jax.decoding.refinement.settings import check_settings
from l2d_jax.decoding.requests import Answer, Piece, Request, path_config
from l2d_jax.decoding.stop_strings import StopSearch
from l2d_jax.errors import InputError, require
from l2d_jax.model.architecture import Architecture
from l2d_jax.model.l2d import Model

GROUPS = 8  # read prompts for an eighth of the lanes at once: for more, lanes would wait; for fewer, reading costs more


def group_size(lanes: int) -> int:
    """The number of prompts that are read at a time once all lanes are in use."""
    return max(1, lanes // GROUPS)


def generate_tokens(model: Model, request: Request) -> list[list[int]]:
    """The token ids of each answer, without the stop token."""
    return [ids for ids, _ in generate_answers(model, request)]


def generate_answers(model: Model, request: Request) -> list[tuple[list[int], str]]:
    """For each answer, its token ids without the stop token, and text of a cut token before a stop string.

    Arguments and errors are those of `decode_lanes`.
    """
    answers: list[tuple[list[int], str]] = [([], "") for _ in range(len(request.prompts) * request.samples)]
    for piece in itertools.chain.from_iterable(decode_lanes(model, request)):
        ids, _ = answers[piece.answer]
        ids += piece.tokens
        answers[piece.answer] = ids, piece.rest
    return answers


def decode_lanes(model: Model, request: Request, *, lanes: int | None = None) -> Iterator[list[Piece]]:
    """Yield the next few tokens of all running answers, until every answer has ended.

    At most `lanes` answers (None: all) are decoded at a time. When one ends, its lane goes to the next prompt, in the
    order of the prompts, without compiling anything. Sorting prompts from long to short takes the least time.

    Raises `InputError` for an empty prompt, for a prompt that leaves no positions for its answer, for a budget that the
    solver or the model cannot spend, for an unknown class or token, and for a stop string that cannot occur. If logits
    of some answers were NaN, it raises once all other answers have ended.
    """
    opened, answers = open_lanes(model, request, lanes=lanes)
    count = opened.free
    group, broken, error = group_size(count), list[int](), None
    opened.admit(answers[:count])
    waiting = answers[count:]
    while not opened.is_idle:
        pieces = opened.step()
        broken += [piece.answer for piece in pieces if piece.ending == "broken"]
        error = next((piece.error for piece in pieces if piece.error is not None), error)
        yield pieces
        while waiting and opened.free >= min(group, len(waiting)):
            opened.admit(waiting[:group])
            waiting = waiting[group:]
    if error is not None:
        raise error
    if broken:
        numbers = (request.prompts[answer // request.samples].number for answer in broken)
        raise broken_logits(numbers, has_grammar=request.restrictions.grammar is not None)


def broken_logits(numbers: Iterable[int], *, has_grammar: bool = False) -> InputError:
    """The error for the prompts with these numbers, whose logits were NaN."""
    known = sorted(set(numbers))
    more = f" and of {len(known) - 5} more" if len(known) > 5 else ""
    problem = f"logits of sequences {known[:5]}{more} were not numbers, which ended them there"
    problem += ", or their response_format became too large" if has_grammar else ""
    return InputError(f"{problem}: check the weights, or use float32")


def open_lanes(model: Model, request: Request, *, lanes: int | None = None) -> tuple[Lanes, list[Answer]]:
    """Check a request as `decode_lanes` does, before any prompt is read; returns the lanes and the answers.

    There are never more lanes than answers.
    """
    path = path_config(model)
    answers = make_answers(request, model.llm.architecture, path)
    chosen = {answer.settings for answer in answers}
    rule = "prompts of one call must share solver, velocity, draws and parallel: use a separate call for the others"
    require(len({(one.solver, one.velocity, one.draws, one.parallel) for one in chosen}) == 1, rule)
    lanes = min(lanes or len(answers), len(answers))
    group = group_size(lanes)
    tokens = max(len(prompt.ids) for prompt in request.prompts) - request.prefix
    remedy = "the number of prompts, samples, draws or max_new_tokens"
    rows, longest = lanes + (group if lanes < len(answers) else 0), max(chosen, key=lambda one: one.max_new_tokens)
    check_decoding_memory(model.llm, path, longest, rows=rows, longest=tokens, remedy=remedy)
    reading = model.reading(refines=any(one.budget > 1 for one in chosen))
    rule = "at a budget of 1 the language model reads the prompt, at larger ones the path: use separate calls"
    require(reading.llm is model.llm or all(one.budget > 1 for one in chosen), rule)
    return Lanes(reading, lanes=lanes, stop_ids=request.stop_ids, group=group, known=request), answers


def make_answers(
    request: Request, architecture: Architecture, path: PathConfig | None, *, first: int = 0
) -> list[Answer]:
    """Make the answers of a request, numbered from `first`, after the checks of `decode_lanes` that need no weights."""
    check_value(request.samples, ranges.Rows, "samples")
    check_value(request.seed, ranges.KeySeed, "seed")
    asked = [(prompt, prompt.settings or request.settings) for prompt in request.prompts]
    chosen = {settings for _, settings in asked} or {request.settings}
    for settings in chosen:
        check_settings(settings, path)
        ids = [prompt.ids for prompt, its in asked if its == settings]
        requests.check_prompts(ids, architecture, new_tokens=settings.max_new_tokens)
    requests.class_labels(path, request.prompts)
    has_label = any(prompt.label is not None for prompt in request.prompts)
    requests.check_asked(request.asked, chosen, path, has_label=has_label)
    restrictions = request.restrictions
    restrictions.check_penalties(architecture.vocab_size)
    search, grammar = StopSearch(restrictions.stops, request.tokenizer), restrictions.grammar
    answers = []
    for number, ((prompt, settings), copy) in enumerate(itertools.product(asked, range(request.samples)), first):
        follows = None if grammar is None else grammar.start()
        answer = Answer(number, prompt, settings, search.again(), request.seed, copy, follows)
        answer.restrictions = restrictions
        answers.append(answer)
    return answers
