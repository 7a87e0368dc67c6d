"""Compares a language model with transformers' model of the same weights in float32.

A row passes if no logit differs by more than 1e-4 of the largest logit or of 1. It also passes if no logit differs by
more than ten times the difference of transformers in float32 (with fused or eager attention) from its float64 on this
row: where activations are in the thousands, a few positions magnify any rounding, and some roundings happen to be much
smaller than others. This second bound takes twice the memory, and is computed only for rows that exceed the first. Our
model may also be in bfloat16 or int8. A row then passes if its mean KL divergence is within 0.05 nats: SmolLM2's rows
have at most 0.006 and 0.011. Bugs with smaller effects must be found in float32. `docs/exactness.md` has figures.
"""

import contextlib
import gc
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import transformers
from jaxtyping import Float, Int

from l2d_jax import loading
from l2d_jax.config.choices import VERIFIED_TOKENS
from l2d_jax.config.schema import MeshConfig
from l2d_jax.data import word_problems
from l2d_jax.data.tokenizer import text_ids
from l2d_jax.distributed import runtime
from l2d_jax.errors import InputError, first_line, require
from l2d_jax.files import read_json
from l2d_jax.model.architecture import Architecture
from l2d_jax.parity.recording import ROUNDINGS
from l2d_jax.weights.locate import find_base_and_adapters

TOLERANCE = 1e-4  # of a logit, relative to the largest one or to 1
DIVERGENCE = 0.05  # largest mean KL of a row in a coarser dtype, in nats
SEED = 0  # seed of the random tokens


class Comparison(NamedTuple):
    """The comparison of our logits with theirs on one row of tokens."""

    name: str
    difference: float  # largest difference of a logit
    largest: float  # largest absolute value of their logits
    divergence: Float[np.ndarray, " T"]  # KL(theirs || ours) of the next token at each position, in nats
    agreement: float  # share of positions with the same most likely token
    rounding: float = 0.0  # largest difference of theirs from their float64, if that was needed
    is_coarse: bool = False  # whether ours are not in float32

    @property
    def bound(self) -> float:
        """The largest allowed difference."""
        return max(TOLERANCE * max(1.0, self.largest), ROUNDINGS * self.rounding)

    def passed(self) -> bool:
        """Whether the difference (in a coarse dtype, the mean divergence) is finite and within its bound."""
        if self.is_coarse:
            return bool(self.divergence.mean() <= DIVERGENCE)
        return bool(np.isfinite(self.difference)) and self.difference <= self.bound


def compare(model: str, *, length: int | None = None, dtype: str = "float32") -> Iterator[Comparison]:
    """Run both models on the same rows, theirs first, one in memory at a time. Doubtful rows come last.

    A path is ignored. Rows have `length` tokens; by default 512, or the number of positions of the model if that is
    smaller. `dtype` is that of our weights, as `config.model.dtype`. Raises `InputError` before any weights are read.
    """
    require_torch()
    opened = loading.find(model, dtype="float32")
    folder = plain_base(model, opened)
    found = opened.find_base()
    rows = choose_rows(found.architecture, found.tokenizer, length=length)
    theirs = _their_logits(folder, rows)
    llm = found.load(dtype=dtype, mesh=runtime.start_jax(MeshConfig()))
    doubtful: list[Comparison] = []
    for name, ids in rows.items():
        with jax.default_matmul_precision("highest"):
            [logits] = np.asarray(_our_logits(llm, jnp.asarray(ids[None], jnp.int32)))
        row = measure(name, logits, theirs[name])._replace(is_coarse=dtype != "float32")
        if row.passed() or row.is_coarse:
            yield row
        else:
            doubtful.append(row)
    del llm
    if doubtful:
        again = {row.name: rows[row.name] for row in doubtful}
        eager = _their_logits(folder, again, attention="eager")
        with in_float64():
            exact = _their_logits(folder, again, dtype="float64")
        for row in doubtful:
            roundings = (measure(row.name, kind[row.name], exact[row.name]).difference for kind in (theirs, eager))
            yield row._replace(rounding=max(roundings))


def require_torch() -> None:
    """Raise `InputError` if torch is not installed."""
    require(importlib.util.find_spec("torch") is not None, "models of transformers need torch: pip install '.[torch]'")


def plain_base(model: str, opened: loading.Folder) -> Path:
    """The folder of a model's base; raises `InputError` for adapters and random weights, which cannot be compared."""
    name = opened.base.name
    if opened.trained is not None and opened.path_config is None:
        raise InputError(f"{model} has trained the language model itself: give its {Path(model) / 'export'}")
    problem = f"the base of {model} is random weights, which transformers cannot read"
    require(name != "random", f"{problem}: give a model in files")
    source = find_base_and_adapters(name)
    problem = f"{name} has a LoRA adapter, and plain weights are compared"
    command = f"python -m l2d_jax.convert export --model {name} --format hf --out DIR"
    require(not source.adapters, f"{problem}: merge it first ({command}) and give that folder")
    return source.folder


def choose_rows(
    architecture: Architecture, tokenizer: transformers.PreTrainedTokenizerFast | None, *, length: int | None
) -> dict[str, Int[np.ndarray, " T"]]:
    """Two rows of random tokens, and one of word problems if there is a tokenizer; raises `InputError` as `compare`."""
    limit, size = architecture.max_position_embeddings, architecture.vocab_size
    length = min(VERIFIED_TOKENS, limit) if length is None else length
    require(1 <= length <= limit, f"--tokens must be from 1 to the {limit} positions of the model, got {length}")
    random = np.random.default_rng(SEED).integers(size, size=(2, length))
    rows = {f"random {i}": row for i, row in enumerate(random, 1)}
    if tokenizer is not None:
        problems = (word_problems.problem(index) for index in range(length // 16 + 1))  # each has more than 16 tokens
        text = "\n\n".join(f"{problem.question}\n{problem.solution}" for problem in problems)
        rows["text"] = np.array(text_ids([text], tokenizer)[0][:length])
        problem = f"the tokenizer of {tokenizer.name_or_path} gives the id {rows['text'].max()}"
        remedy = "copy the model's own tokenizer.json"
        require(bool(rows["text"].max() < size), f"{problem}, but the model knows {size} tokens: {remedy}")
    return rows


def measure(name: str, ours: Float[np.ndarray, "T V"], theirs: Float[np.ndarray, "T V"]) -> Comparison:
    """Compare the logits of a row in float64, position by position, to save memory."""
    differences, divergence = [], []
    for pair in zip(ours, theirs, strict=True):
        a, b = (logits.astype(np.float64) for logits in pair)
        differences.append(np.max(np.abs(a - b)))
        log_p, log_q = (logits - np.logaddexp.reduce(logits) for logits in (b, a))
        divergence.append(np.exp(log_p) @ (log_p - log_q))
    agreement = float(np.mean(np.argmax(ours, axis=-1) == np.argmax(theirs, axis=-1)))
    return Comparison(name, float(np.max(differences)), float(np.max(np.abs(theirs))), np.array(divergence), agreement)


_our_logits = jax.jit(lambda llm, row: llm.logits(llm(row, jnp.arange(row.shape[1])[None])[0]))


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Run PyTorch entirely in float64, including norms and rotary angles, for which modules request float32."""
    import torch
    from torch.overrides import TorchFunctionMode

    def wider(value: Any) -> Any:
        return torch.float64 if value is torch.float32 else value

    class Float64(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            function = torch.Tensor.double if function is torch.Tensor.float else function
            return function(*map(wider, args), **{name: wider(value) for name, value in (kwargs or {}).items()})

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Float64():
            yield
    finally:
        torch.set_default_dtype(before)


def _their_logits(
    folder: Path, rows: dict[str, np.ndarray], *, dtype: str = "float32", attention: str = "sdpa"
) -> dict[str, np.ndarray]:
    import torch

    kind = getattr(transformers, read_json(folder / "config.json")["architectures"][0])  # one of `SUPPORTED`
    model = open_theirs(kind, folder, dtype=dtype, attn_implementation=attention)
    with torch.no_grad():
        logits = {name: model(torch.tensor(row[None])).logits[0].numpy() for name, row in rows.items()}
    del model
    gc.collect()
    return logits


def open_theirs(kind: Any, folder: Path, *, dtype: str = "float32", **options: Any) -> Any:
    """Open the model in a folder with a class of transformers, from local files; raises `InputError`."""
    transformers.utils.logging.disable_progress_bar()
    try:
        return kind.from_pretrained(folder, local_files_only=True, use_safetensors=True, dtype=dtype, **options).eval()
    except Exception as error:  # many kinds, for example for a config field that it reads and we do not
        raise InputError(f"transformers cannot open {folder} ({first_line(error)}): fix its files") from error
