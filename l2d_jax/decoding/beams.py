"""The beams of a token search: how they are sampled, scored, kept and ended, in a scan over tokens.

The score of an answer of L tokens, its end token included, is

    score = (log-likelihood - penalty * repeats) / L^power

where a repeat is a token that completes an n-gram which the answer already had: the soft form of the rule that no
trigram may occur twice (Paulus et al., arXiv 1705.04304), which a large penalty gives back.

Notable: all beams share the noise of the ODE, which is that of `decode.decode`. So a seed is one distribution over
answers, under which beams compare: with noise of its own each, the search would keep those with the luckiest.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from l2d_jax.config.parsing import require
from l2d_jax.decoding import decode
from l2d_jax.decoding.refine import Refinement
from l2d_jax.model.l2d import Model


@dataclass(frozen=True)
class SearchConfig:
    """How to search. The budget of `DecodeConfig` is that of each beam: a token costs `beams` times as much."""

    beams: int = 4  # answers that are kept
    candidates: int = 4  # distinct tokens that are sampled to go on with each beam
    length_power: float = 1.0  # of the number of tokens that divides the score; 0: the sum, 1: the mean
    repetition_penalty: float = 0.0  # nats that each repeat costs; 0: none
    repetition_ngram: int = 3  # consecutive tokens that make a repeat where they occur again
    temperature: float = 1.0  # of the sampled completions; 0: the likeliest
    final_temperature: float = 0.0  # of the draw of the answer, in units of the score; 0: the best
    max_new_tokens: int = 256

    def __post_init__(self) -> None:
        for name in ("beams", "candidates", "repetition_ngram", "max_new_tokens"):
            require(getattr(self, name) >= 1, f"search.{name} must be at least 1, got {getattr(self, name)}")
        for name in ("length_power", "repetition_penalty", "temperature", "final_temperature"):
            value = getattr(self, name)
            require(0 <= value <= 1000, f"search.{name} must be in [0, 1000], got {value}")
        require(
            self.beams == 1 or self.candidates > 1,
            f"one candidate a step never makes {self.beams} beams of one prompt: use search.candidates of at least 2",
        )


@nnx.dataclass
class Scoring(nnx.Module):
    """How answers are sampled, scored and ended; arguments of one compiled program."""

    length_power: Float[Array, ""] = nnx.data()
    repetition_penalty: Float[Array, ""] = nnx.data()
    repetition_ngram: Int[Array, ""] = nnx.data()
    temperature: Float[Array, ""] = nnx.data()
    longest: Int[Array, ""] = nnx.data()  # tokens at which an answer ends
    ends: Int[Array, " ends"] = nnx.data()  # tokens that end it
    gate: Float[Array, " 1"] = nnx.data()  # skip the ODE where the LM's own entropy is below this, in nats
    allowed: Bool[Array, " V"] | None = nnx.data(default=None)  # tokens that may be drawn; None: all

    @classmethod
    def from_config(
        cls, config: SearchConfig, *, ends: Sequence[int], gate: float = 0.0, allowed: Any = None
    ) -> "Scoring":
        """The same numbers as arrays."""
        return cls(
            length_power=jnp.float32(config.length_power),
            repetition_penalty=jnp.float32(config.repetition_penalty),
            repetition_ngram=jnp.int32(config.repetition_ngram),
            temperature=jnp.float32(config.temperature),
            longest=jnp.int32(config.max_new_tokens),
            ends=jnp.array(list(ends) or [-1], jnp.int32),
            gate=jnp.float32([gate]),
            allowed=None if allowed is None else jnp.asarray(allowed, bool),
        )

    def score(
        self, log_likelihood: Float[Array, "*B"], repeats: Int[Array, "*B"], lengths: Int[Array, "*B"]
    ) -> Float[Array, "*B"]:
        """Of answers with so many tokens."""
        return (log_likelihood - self.repetition_penalty * repeats) / jnp.maximum(lengths, 1) ** self.length_power


@nnx.dataclass
class Beams(nnx.Module):
    """Everything that the next step depends on; a log-likelihood of minus infinity is a free place."""

    state: decode.State = nnx.data()  # the same key for all; done: the answer has ended, or the place is free
    tokens: Int[Array, "B room"] = nnx.data()  # the answers so far; -1: none
    matches: Int[Array, "B room"] = nnx.data()  # how many tokens before each slot are those before the next one
    lengths: Int[Array, " B"] = nnx.data()
    repeats: Int[Array, " B"] = nnx.data()
    log_likelihood: Float[Array, " B"] = nnx.data()


@partial(jax.jit, static_argnames=("beams", "room"))
def start(state: decode.State, *, beams: int, room: int) -> Beams:
    """One beam from a prefill of one prompt, and places for the others."""
    zeros, is_free = jnp.zeros(beams, jnp.int32), jnp.arange(beams) > 0
    return Beams(
        state=dataclasses.replace(decode.select(state, zeros), done=is_free),
        tokens=jnp.full((beams, room), -1, jnp.int32),
        matches=jnp.zeros((beams, room), jnp.int32),
        lengths=zeros,
        repeats=zeros,
        log_likelihood=jnp.where(is_free, -jnp.inf, jnp.float32(0)),
    )


@partial(jax.jit, static_argnames=("candidates", "steps", "draws"), donate_argnames="beams")
def extend(
    model: Model,
    beams: Beams,
    *,
    settings: Refinement,
    scoring: Scoring,
    candidates: int,
    steps: int,
    draws: int = 1,
    label: Int[Array, " 1"] | None = None,
) -> Beams:
    """Go on for `steps` tokens; beams that have ended compete with the score that they ended with.

    Args:
      model: the LM and the path.
      beams: from `start` or an earlier call; donated.
      settings: solver, grid and velocity, of each beam.
      scoring: how answers are sampled, scored and ended.
      candidates: tokens that are sampled for each beam.
      steps: tokens to go on for.
      draws: noise draws whose mean distribution is the answer's.
      label: class for guidance, or None.
    """

    def step(beams: Beams, _: None) -> tuple[Beams, None]:
        state, count = beams.state, beams.state.count
        labels = None if label is None else jnp.broadcast_to(label, state.done.shape)
        keys, logits = decode.refined_logits(
            model, state, gate=scoring.gate, settings=settings, draws=draws, labels=labels
        )
        is_bad = jnp.isnan(logits).any(axis=-1) & ~state.done
        state = dataclasses.replace(state, broken=state.broken | is_bad.any())  # of all, for beams may be dropped
        if scoring.allowed is not None:
            logits = jnp.where(scoring.allowed, logits, -jnp.inf)
        chances = jnp.where(is_bad[:, None], -jnp.inf, jax.nn.log_softmax(logits))
        with jax.named_scope("candidates"):
            # The largest of log p / T + Gumbel noise are a sample without replacement (Kool et al., arXiv 1903.06059).
            noise = scoring.temperature * jax.random.gumbel(keys[0], chances.shape)
            drawn = jax.lax.top_k(logits + noise, candidates)[1]
            repeats = beams.repeats[:, None] + is_repeat(beams, drawn, ngram=scoring.repetition_ngram)
            likelihood = beams.log_likelihood[:, None] + jnp.take_along_axis(chances, drawn, axis=1)
            going = scoring.score(likelihood, repeats, jnp.broadcast_to(count + 1, drawn.shape))
        with jax.named_scope("selection"):
            ended = scoring.score(beams.log_likelihood, beams.repeats, beams.lengths)
            scores = jnp.where(state.done[:, None], -jnp.inf, going)
            scores = jnp.concatenate([scores, jnp.where(state.done, ended, -jnp.inf)[:, None]], axis=1)
            kept, best = jax.lax.top_k(scores.reshape(-1), scores.shape[0])
            parents, column = best // (candidates + 1), best % (candidates + 1)
            is_old, place = column == candidates, (parents, jnp.minimum(column, candidates - 1))
            token = jnp.where(is_old, -1, drawn[place])
            is_free = jnp.isneginf(kept)
            done = is_free | is_old | (token[:, None] == scoring.ends).any(axis=-1) | (count + 1 >= scoring.longest)
            agree = jnp.where(beams.tokens[parents] == token[:, None], beams.matches[parents] + 1, 0)
            sums = jnp.where(is_old, beams.log_likelihood[parents], likelihood[place])
            state = decode.advance(model.llm, decode.select(state, parents), jnp.maximum(token, 0), done)
        return Beams(
            state=state,
            tokens=beams.tokens[parents].at[:, count].set(token),
            matches=jnp.roll(agree, 1, axis=1).at[:, 0].set(0),
            lengths=jnp.where(is_old, beams.lengths[parents], count + 1),
            repeats=jnp.where(is_old, beams.repeats[parents], repeats[place]),
            log_likelihood=jnp.where(is_free, -jnp.inf, sums),
        ), None

    return jax.lax.scan(step, beams, None, length=steps)[0]


def is_repeat(beams: Beams, tokens: Int[Array, "B K"], *, ngram: Int[Array, ""]) -> Bool[Array, "B K"]:
    """Whether each token would complete an n-gram that its answer already has; the prompt does not count."""
    follows = beams.matches >= ngram - 1  # its n - 1 tokens before are the newest of the answer
    return ((beams.tokens[:, None] == tokens[..., None]) & follows[:, None]).any(axis=-1)
