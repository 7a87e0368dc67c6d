"""The beams of a token search: how they are extended, scored, selected and ended, in a scan over tokens.

The score of an answer of L tokens, including its stop token, is

    score = (log-likelihood - penalty * repeats) / L^power

where a repeat is a token that completes an n-gram which the answer already contains. This is a soft form of the rule
that no trigram may occur twice (Paulus et al., arXiv 1705.04304); a large penalty gives the rule itself.

All beams share the noise of the ODE, which equals that of ordinary decoding. So a seed defines one distribution over
answers, and beams are compared under it. With different noise per beam, the search would keep the luckiest noise.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from l2d_jax.config import ranges
from l2d_jax.config.parsing import check_fields
from l2d_jax.decoding.refinement.settings import Refinement
from l2d_jax.decoding.sampler import SamplingOptions
from l2d_jax.decoding.state import State, select
from l2d_jax.decoding.token_step import advance, refined_logits
from l2d_jax.errors import require
from l2d_jax.model.l2d import Model


@dataclasses.dataclass(frozen=True)
class SearchConfig:
    """How to search. The budget of `DecodeConfig` is per beam, so a token costs `beams` times as much."""

    beams: ranges.Beams = 4  # number of answers kept after every token
    candidates: ranges.Count = 4  # number of distinct tokens sampled to extend each beam
    length_power: ranges.Power = 1.0  # the score is divided by length ** length_power; 0: the sum, 1: the mean
    repetition_penalty: ranges.Nats = 0.0  # cost of each repeat, in nats; 0: none
    repetition_ngram: ranges.Count = 3  # length of the n-grams that count as repeats
    temperature: ranges.Temperature = 1.0  # for sampling candidates; 0: the most likely tokens
    # temperature for sampling the answer among the final beams, in units of the score; 0: the best beam
    final_temperature: ranges.Temperature = 0.0
    max_new_tokens: ranges.Tokens = 256

    def __post_init__(self) -> None:
        check_fields(self, prefix="search")
        problem = f"one candidate a step never makes {self.beams} beams of one prompt"
        require(self.beams == 1 or self.candidates > 1, f"{problem}: use search.candidates of at least 2")


@nnx.dataclass
class Scoring(nnx.Module):
    """How answers are sampled, scored and ended, as arrays that a compiled program takes as arguments."""

    length_power: Float[Array, ""] = nnx.data()
    repetition_penalty: Float[Array, ""] = nnx.data()
    repetition_ngram: Int[Array, ""] = nnx.data()
    max_new_tokens: Int[Array, ""] = nnx.data()
    stop_ids: Int[Array, " stops"] = nnx.data()  # tokens that end an answer
    sampling: SamplingOptions = nnx.data()  # only its temperature, gate and masks are used

    @classmethod
    def from_config(cls, config: SearchConfig, stop_ids: Sequence[int], sampling: SamplingOptions) -> "Scoring":
        """Convert the options to arrays."""
        floats = {name: jnp.float32(getattr(config, name)) for name in ("length_power", "repetition_penalty")}
        counts = {name: jnp.int32(getattr(config, name)) for name in ("repetition_ngram", "max_new_tokens")}
        return cls(**floats, **counts, stop_ids=jnp.array(stop_ids or [-1], jnp.int32), sampling=sampling)

    def score(
        self, log_likelihood: Float[Array, "*B"], repeats: Int[Array, "*B"], lengths: Int[Array, "*B"]
    ) -> Float[Array, "*B"]:
        """The scores of answers; `lengths` are in tokens."""
        return (log_likelihood - self.repetition_penalty * repeats) / jnp.maximum(lengths, 1) ** self.length_power


@nnx.dataclass
class Beams(nnx.Module):
    """The state of a search. A beam with a log-likelihood of minus infinity is an empty slot."""

    state: State = nnx.data()  # all rows share one key; done: the answer has ended, or the slot is empty
    tokens: Int[Array, "B capacity"] = nnx.data()  # the answers so far; -1: no token
    matches: Int[Array, "B capacity"] = nnx.data()  # for each place, how many tokens before it equal the newest tokens
    lengths: Int[Array, " B"] = nnx.data()
    repeats: Int[Array, " B"] = nnx.data()
    log_likelihood: Float[Array, " B"] = nnx.data()


@partial(jax.jit, static_argnames=("beams", "capacity"))
def start_beams(state: State, *, beams: int, capacity: int) -> Beams:
    """Start with one beam, from the prefill of a prompt, and empty slots for the other beams."""
    zeros, is_empty = jnp.zeros(beams, jnp.int32), jnp.arange(beams) > 0
    return Beams(
        state=dataclasses.replace(select(state, zeros), done=is_empty),
        tokens=jnp.full((beams, capacity), -1, jnp.int32),
        matches=jnp.zeros((beams, capacity), jnp.int32),
        lengths=zeros,
        repeats=zeros,
        log_likelihood=jnp.where(is_empty, -jnp.inf, jnp.float32(0)),
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
    """Extend the beams by `steps` tokens, sampling `candidates` tokens for each beam. `beams` is donated.

    Beams that have ended compete with their final score.
    """

    def step(beams: Beams, _: None) -> tuple[Beams, None]:
        labels = None if label is None else jnp.broadcast_to(label, beams.state.done.shape)
        options: dict[str, Any] = {"settings": settings, "noise_samples": draws, "labels": labels}
        options |= {"gate": scoring.sampling.gate, "draws": scoring.sampling.draws}
        keys, logits, _taken = refined_logits(model, beams.state, **options)
        is_bad = jnp.isnan(logits).any(axis=-1) & ~beams.state.done
        # Mark all beams as broken, because selection may drop the beam whose logits are not finite.
        state = dataclasses.replace(beams.state, broken=beams.state.broken | is_bad.any())
        beams = dataclasses.replace(beams, state=state)
        if scoring.sampling.allowed is not None:
            logits = jnp.where(scoring.sampling.allowed, logits, -jnp.inf)
        with jax.named_scope("candidates"):
            sampled = _sample_candidates(beams, logits, is_bad, keys[0], scoring, candidates=candidates)
        with jax.named_scope("selection"):
            return _select_beams(model, beams, sampled, scoring), None

    return jax.lax.scan(step, beams, None, length=steps)[0]


def _sample_candidates(
    beams: Beams, logits: Float[Array, "B V"], is_bad: Bool[Array, " B"], key: Any, scoring: Scoring, *, candidates: int
) -> tuple[Int[Array, "B K"], Float[Array, "B K"], Int[Array, "B K"]]:
    """Sample tokens to extend each beam; also returns the log-likelihoods and repeats of the extended answers.

    Candidates of beams with bad logits are never selected. The K largest values of log p / T + Gumbel noise are a
    sample without replacement (Kool et al., arXiv 1903.06059).
    """
    log_probs = jnp.where(is_bad[:, None], -jnp.inf, jax.nn.log_softmax(logits))
    noise = scoring.sampling.temperature * jax.random.gumbel(key, log_probs.shape)
    tokens = jax.lax.top_k(logits + noise, candidates)[1]
    # A repeat completes an n-gram of the answer: the n - 1 tokens before an earlier place equal the newest ones.
    follows = beams.matches >= scoring.repetition_ngram - 1
    is_repeat = ((beams.tokens[:, None] == tokens[..., None]) & follows[:, None]).any(axis=-1)
    log_likelihood = beams.log_likelihood[:, None] + jnp.take_along_axis(log_probs, tokens, axis=1)
    return tokens, log_likelihood, beams.repeats[:, None] + is_repeat


def _select_beams(model: Model, beams: Beams, sampled: tuple[Array, Array, Array], scoring: Scoring) -> Beams:
    """Keep the best among extended and ended beams, and feed the new tokens to the LM."""
    state, count, (tokens, log_likelihood, repeats) = beams.state, beams.state.count[0], sampled
    candidates = tokens.shape[1]
    extended = scoring.score(log_likelihood, repeats, jnp.broadcast_to(count + 1, tokens.shape))
    ended = scoring.score(beams.log_likelihood, beams.repeats, beams.lengths)
    scores = jnp.where(state.done[:, None], -jnp.inf, extended)
    scores = jnp.concatenate([scores, jnp.where(state.done, ended, -jnp.inf)[:, None]], axis=1)
    best_scores, best = jax.lax.top_k(scores.reshape(-1), scores.shape[0])
    parents, column = best // (candidates + 1), best % (candidates + 1)
    is_old, place = column == candidates, (parents, jnp.minimum(column, candidates - 1))
    token = jnp.where(is_old, -1, tokens[place])
    is_empty = jnp.isneginf(best_scores)
    is_stop = (token[:, None] == scoring.stop_ids).any(axis=-1) | (count + 1 >= scoring.max_new_tokens)
    log_likelihood = jnp.where(is_old, beams.log_likelihood[parents], log_likelihood[place])
    matches = jnp.where(beams.tokens[parents] == token[:, None], beams.matches[parents] + 1, 0)
    done, chosen = is_empty | is_old | is_stop, select(state, parents)
    return Beams(
        state=advance(model.llm, chosen, jnp.maximum(token, 0), done),
        tokens=beams.tokens[parents].at[:, count].set(token),
        matches=jnp.roll(matches, 1, axis=1).at[:, 0].set(0),
        lengths=jnp.where(is_old, beams.lengths[parents], count + 1),
        repeats=jnp.where(is_old, beams.repeats[parents], repeats[place]),
        log_likelihood=jnp.where(is_empty, -jnp.inf, log_likelihood),
    )
