"""Text in, text out: streams the answers of a model. The Python interface of the package."""

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from transformers import PreTrainedTokenizerFast

from l2d_jax import decode, tokens
from l2d_jax.architecture import Architecture
from l2d_jax.config import DecodeConfig
from l2d_jax.errors import InputError
from l2d_jax.loaded import Loaded
from l2d_jax.refine import Refinement, check_labels

CHUNK = 8  # tokens between two pieces of streamed text
SHORTEST_BUCKET = 64  # prompts are padded to this many tokens, or twice, four times … as many


def generate(
    loaded: Loaded,
    prompts: Sequence[Sequence[int]],
    *,
    settings: DecodeConfig | None = None,
    seed: int = 0,
    labels: Sequence[int] | None = None,
) -> list[list[int]]:
    """Token ids that follow each prompt of token ids, without the end token.

    A sequence's result does not depend on the others in the batch. Raises `InputError` as `stream` does.
    """
    answers: list[list[int]] = [[] for _ in prompts]
    for piece in stream(loaded, prompts, settings=settings, seed=seed, labels=labels):
        for answer, new in zip(answers, piece, strict=True):
            answer.extend(new)
    return answers


def stream(
    loaded: Loaded,
    prompts: Sequence[Sequence[int]],
    *,
    settings: DecodeConfig | None = None,
    seed: int = 0,
    labels: Sequence[int] | None = None,
) -> Iterator[list[list[int]]]:
    """Yield the next few token ids of every sequence until all have ended.

    Args:
      loaded: from `load`.
      prompts: token ids.
      settings: budget, solver, temperatures and length; None: the model's own.
      seed: sequence i draws from a key that is a function of the seed and i.
      labels: classes for guidance, one per prompt.

    Raises:
      InputError: for an empty prompt, one that leaves no room in the model's context, a budget that the solver or the
        model does not know, or an unknown class.
    """
    settings = loaded.defaults if settings is None else settings
    model = loaded.model
    refinement = check_settings(settings, has_path=model.path is not None)
    check_prompts(prompts, settings, model.llm.architecture)
    if labels is not None:
        if len(labels) != len(prompts):
            raise InputError(f"guidance takes one class label per prompt, got {len(labels)} for {len(prompts)} prompts")
        check_labels(model, labels)
    chunks = -(-settings.max_new_tokens // CHUNK)
    ids, lengths = _pad(prompts)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.arange(len(prompts)))
    state = decode.prefill(model.llm, ids, lengths, keys, room=chunks * CHUNK)
    finished = [False] * len(prompts)
    for number in range(chunks):
        state, new = decode.decode(
            model,
            state,
            settings=refinement,
            temperature=jnp.float32(settings.temperature),
            ends=jnp.array(loaded.ends or (-1,), jnp.int32),
            steps=CHUNK,
            labels=None if labels is None else jnp.array(labels, jnp.int32),
        )
        left = settings.max_new_tokens - number * CHUNK
        piece = []
        for i, row in enumerate(np.asarray(new)[:, :left].tolist()):
            stop = next((j for j, token in enumerate(row) if token in loaded.ends), None)
            piece.append(row[:stop])  # a sequence that has ended goes on with end tokens
            finished[i] = finished[i] or stop is not None
        yield piece
        if all(finished):
            return


def check_settings(settings: DecodeConfig, *, has_path: bool) -> Refinement:
    """The settings as the solver takes them; raises `InputError` for a budget that cannot be spent."""
    if not has_path and settings.budget != 1:
        raise InputError(
            f"a budget of {settings.budget} needs a diffusion path, and this model has none: use a budget of 1"
        )
    return Refinement.from_config(settings)


def check_prompts(prompts: Sequence[Sequence[int]], settings: DecodeConfig, architecture: Architecture) -> None:
    """Raise `InputError` for an empty prompt, and for one that leaves no room for the answer."""
    if not prompts or not all(prompts):
        raise InputError("a prompt is empty: give at least one token")
    longest, limit = max(map(len, prompts)), architecture.max_position_embeddings
    if longest + settings.max_new_tokens > limit:
        raise InputError(
            f"a prompt of {longest} tokens and {settings.max_new_tokens} new ones exceed the {limit} positions of the "
            "model: shorten the prompt or lower max_new_tokens"
        )


def encode_prompt(messages: Sequence[dict[str, str]], tokenizer: PreTrainedTokenizerFast | None) -> list[int]:
    """The token ids of a conversation up to the next answer; raises `InputError` as `stream_text` does."""
    if tokenizer is None:
        raise InputError("the model folder has no tokenizer: add its tokenizer files to generate text")
    return tokens.prompt_ids(messages, tokenizer)


def stream_text(
    loaded: Loaded, messages: Sequence[dict[str, str]], *, settings: DecodeConfig | None = None, seed: int = 0
) -> Iterator[str]:
    """Yield the assistant's answer to a conversation as pieces of text, each complete in UTF-8.

    Raises `InputError` if the model has no tokenizer or its tokenizer no chat template.
    """
    prompt = encode_prompt(messages, loaded.tokenizer)
    answer: list[int] = []
    shown = ""
    for piece in stream(loaded, [prompt], settings=settings, seed=seed):
        answer.extend(piece[0])
        text = _decode(answer, loaded.tokenizer)
        if not text.endswith("\ufffd"):  # the rest of a character is still to come
            yield text[len(shown) :]
            shown = text
    yield _decode(answer, loaded.tokenizer)[len(shown) :]


def _decode(ids: Sequence[int], tokenizer: PreTrainedTokenizerFast | None) -> str:
    assert tokenizer is not None
    # Llama's tokenizers ask for a clean-up, with which "a" and " ." would be "a.": a stream cannot take a space back.
    text = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def _pad(prompts: Sequence[Sequence[int]]) -> tuple[jax.Array, jax.Array]:
    """Prompts padded on the right to a length bucket, so that few lengths are ever compiled."""
    bucket = SHORTEST_BUCKET
    while bucket < max(map(len, prompts)):
        bucket *= 2
    ids = np.zeros((len(prompts), bucket), np.int32)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    return jnp.array(ids), jnp.array([len(prompt) for prompt in prompts], jnp.int32)
