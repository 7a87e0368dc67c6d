"""Text in, text out: loads a trained model and streams its answers. The Python interface of the package."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerFast

from l2d_jax import decode, models, runtime, sharding, tokens
from l2d_jax.checkpoint import Checkpoints
from l2d_jax.config import Config, DecodeConfig, MeshConfig, ModelConfig
from l2d_jax.diffusion_path import DiffusionPath
from l2d_jax.errors import InputError
from l2d_jax.refine import Model, Refinement, check_labels
from l2d_jax.sources import read_json

CHUNK = 8  # tokens between two pieces of streamed text
SHORTEST_BUCKET = 64  # prompts are padded to this many tokens, or twice, four times … as many


class Loaded(NamedTuple):
    """A model that is ready to generate."""

    model: Model
    tokenizer: PreTrainedTokenizerFast | None
    ends: tuple[int, ...]  # tokens that end an answer
    defaults: DecodeConfig  # how it was validated while it was trained


def load(folder: str | os.PathLike, *, mesh: Mesh | None = None, dtype: str | None = None) -> Loaded:
    """Open a workdir of training, a model folder, or a plain Hugging Face folder (which knows a budget of 1 alone).

    Args:
      folder: where the model is; a hub id or GGUF file is a plain model.
      mesh: the devices to use; None: all.
      dtype: "float32" or "bfloat16", of weights and products; None: as it was trained, bfloat16 for plain models.

    Raises:
      InputError: for anything that is missing, malformed or does not fit.
    """
    mesh = runtime.start(MeshConfig()) if mesh is None else mesh
    path = Path(folder)
    if (path / "checkpoints").is_dir():
        config = Config.from_dict(read_json(path / "config.json"))
        base = models.open_base(_with_dtype(config.model, dtype), mesh, seed=config.train.seed)
        return _loaded(base, _newest_path(path, config, base, mesh), config.decode)
    if (path / "path.json").exists():
        name = str(folder) if (path / "config.json").exists() else read_json(path / "path.json")["base"]
        base = models.open_base(_with_dtype(ModelConfig(name=name), dtype), mesh)
        return _loaded(base, models.load_path(path, base.llm.architecture, mesh), DecodeConfig())
    base = models.open_base(_with_dtype(ModelConfig(name=str(folder)), dtype), mesh)
    return _loaded(base, None, DecodeConfig(budget=1, solver="euler"))


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
    limit = model.llm.architecture.max_position_embeddings
    longest = max((len(prompt) for prompt in prompts), default=0)
    if not prompts or not all(prompts):
        raise InputError("a prompt is empty: give at least one token")
    if longest + settings.max_new_tokens > limit:
        raise InputError(
            f"a prompt of {longest} tokens and {settings.max_new_tokens} new ones exceed the model's {limit} positions: "
            "shorten the prompt or lower max_new_tokens"
        )
    if model.path is None and settings.budget != 1:
        raise InputError(
            f"a budget of {settings.budget} needs a diffusion path, and this model has none: use a budget of 1"
        )
    if labels is not None:
        check_labels(model, labels)
    refinement = Refinement.from_config(settings)
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
            piece.append([] if finished[i] else row[:stop])
            finished[i] = finished[i] or stop is not None
        yield piece
        if all(finished):
            return


def stream_text(
    loaded: Loaded, messages: Sequence[dict[str, str]], *, settings: DecodeConfig | None = None, seed: int = 0
) -> Iterator[str]:
    """Yield the assistant's answer to a conversation as pieces of text, each complete in UTF-8.

    Raises `InputError` if the model has no tokenizer or its tokenizer no chat template.
    """
    tokenizer = loaded.tokenizer
    if tokenizer is None:
        raise InputError("the model folder has no tokenizer: add its tokenizer files to generate text")
    prompt = tokens.prompt_ids(list(messages), tokenizer)
    answer: list[int] = []
    shown = ""
    for piece in stream(loaded, [prompt], settings=settings, seed=seed):
        answer.extend(piece[0])
        text = tokenizer.decode(answer, skip_special_tokens=True)
        if not text.endswith("\ufffd"):  # the rest of a character is still to come
            yield text[len(shown) :]
            shown = text
    yield tokenizer.decode(answer, skip_special_tokens=True)[len(shown) :]


def _pad(prompts: Sequence[Sequence[int]]) -> tuple[jax.Array, jax.Array]:
    """Prompts padded on the right to a length bucket, so that few lengths are ever compiled."""
    bucket = SHORTEST_BUCKET
    while bucket < max(map(len, prompts)):
        bucket *= 2
    ids = np.zeros((len(prompts), bucket), np.int32)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    return jnp.array(ids), jnp.array([len(prompt) for prompt in prompts], jnp.int32)


def _loaded(base: models.Base, path: DiffusionPath | None, defaults: DecodeConfig) -> Loaded:
    return Loaded(Model.build(base.llm, path), base.tokenizer, base.ends, defaults)


def _newest_path(workdir: Path, config: Config, base: models.Base, mesh: Mesh) -> DiffusionPath:
    checkpoints = Checkpoints(workdir / "checkpoints")
    step = checkpoints.latest()
    if step is None:
        raise InputError(f"workdir {workdir} has no checkpoint yet: train it first")
    declared = DiffusionPath.declare(config.path, base.llm.architecture)
    return checkpoints.restore(step, {"path": sharding.abstract(declared, mesh)})["path"]


def _with_dtype(config: ModelConfig, dtype: str | None) -> ModelConfig:
    return config if dtype is None else ModelConfig(config.name, config.architecture, dtype)  # type: ignore[arg-type]
