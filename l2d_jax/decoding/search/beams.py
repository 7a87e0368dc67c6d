"""The beams of token searches: how they are extended, scored, selected and ended, in a scan over tokens.

Several prompts are searched together. Their beams are the rows of one program, the B beams of a prompt next to each
other. Beams compete only with those of their prompt. Shapes: P prompts, B beams of each, R = P * B rows.

The score of an answer of L tokens, including its stop token, is

    score = (log-likelihood - penalty * repeats) / L^power

where a repeat is a token that completes an n-gram which the answer already contains. This is a soft form of the rule
that no trigram may occur twice (Paulus et al., arXiv 1705.04304); a large penalty gives the rule itself.

All beams of a prompt share the noise of the ODE, which equals that of ordinary decoding. So a seed defines one
distribution over answers, and beams are compared under it. With different noise per beam, the search would keep the
luckiest noise.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from l2d_jax.config import ranges
from l2d_jax.config.parsing import check_fields
from l2d_jax.decoding.refinement.settings import Refinement
from l2d_jax.decoding.sampler import SamplingOptions
from l2d_jax.decoding.state import State, refill, select
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
    """The state of P searches with B beams each. A beam with a log-likelihood of minus infinity is an empty slot.

    The rows of a prompt share one key.
    """

    state: State = nnx.data()  # R rows; done: the answer has ended, or the slot is empty
    tokens: Int[Array, "P B capacity"] = nnx.data()  # the answers so far; -1: no token
    matches: Int[Array, "P B capacity"] = nnx.data()  # for each place, how many tokens before it equal the newest ones
    lengths: Int[Array, "P B"] = nnx.data()
    repeats: Int[Array, "P B"] = nnx.data()
    log_likelihood: Float[Array, "P B"] = nnx.data()
    evaluations: Int[Array, " P"] = nnx.data()  # evaluations of the path so far, of all beams that were running
    passes: Int[Array, " P"] = nnx.data()  # passes over the weights in which a running beam was a row; one for each


COLUMNS = ("tokens", "matches", "lengths", "repeats", "log_likelihood", "evaluations", "passes")  # other than the state


@partial(jax.jit, static_argnames=("beams", "capacity"))
def start_beams(state: State, *, beams: int, capacity: int) -> Beams:
    """Start each search with one beam, from the prefill of its prompt, and empty slots for its other beams."""
    prompts = len(state.count)
    zeros = jnp.zeros((prompts, beams), jnp.int32)
    is_empty = jnp.broadcast_to(jnp.arange(beams) > 0, zeros.shape)
    rows = jnp.repeat(jnp.arange(prompts), beams)
    return Beams(
        state=dataclasses.replace(select(state, rows), done=is_empty.reshape(-1)),
        tokens=jnp.full((prompts, beams, capacity), -1, jnp.int32),
        matches=jnp.zeros((prompts, beams, capacity), jnp.int32),
        lengths=zeros,
        repeats=zeros,
        log_likelihood=jnp.where(is_empty, -jnp.inf, jnp.float32(0)),
        evaluations=zeros[:, 0],
        passes=zeros[:, 0],
    )


def replace_searches(beams: Beams, new: Beams, places: Int[Array, " new"]) -> Beams:
    """Put each search of `new` in the place of another one. `beams` is donated.

    A search whose place is beyond the last one is dropped. Both caches have the same number of slots.
    """
    count = beams.lengths.shape[1]
    rows = (places[:, None] * count + jnp.arange(count)).reshape(-1)
    columns = {name: _replace_rows(getattr(beams, name), getattr(new, name), places) for name in COLUMNS}
    return Beams(state=refill(beams.state, new.state, rows), **columns)


@jax.jit
def _replace_rows(old: Array, new: Array, places: Int[Array, " new"]) -> Array:
    return old.at[places].set(new, mode="drop")


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
    labels: Int[Array, " R"] | None = None,
) -> Beams:
    """Extend the beams by `steps` tokens, sampling `candidates` tokens for each beam. `beams` is donated.

    Beams that have ended compete with their final score.
    """
    options: dict[str, Any] = {"settings": settings, "noise_samples": draws, "labels": labels}
    options |= {"gate": scoring.sampling.gate, "draws": scoring.sampling.draws}

    def step(beams: Beams, _: None) -> tuple[Beams, None]:
        shape = beams.lengths.shape
        keys, logits, taken = refined_logits(model, beams.state, **options)
        is_bad = (jnp.isnan(logits).any(axis=-1) & ~beams.state.done).reshape(shape)
        # Mark all beams of a prompt as broken, because selection may drop the beam whose logits are not finite.
        broken = jnp.repeat(is_bad.any(axis=1), shape[1])
        state = dataclasses.replace(beams.state, broken=beams.state.broken | broken)
        passes = jnp.where(state.done, 0, 1 + taken.passes)
        costs = {"evaluations": taken.evaluations, "passes": passes}  # no evaluation where a beam has ended
        costs = {name: getattr(beams, name) + cost.reshape(shape).sum(axis=1) for name, cost in costs.items()}
        beams = dataclasses.replace(beams, state=state, **costs)
        if scoring.sampling.allowed is not None:
            logits = jnp.where(scoring.sampling.allowed, logits, -jnp.inf)
        with jax.named_scope("candidates"):
            keys, logits = keys.reshape(shape)[:, 0], logits.reshape(*shape, -1)
            sampled = _sample_candidates(beams, logits, is_bad, keys, scoring, candidates=candidates)
        with jax.named_scope("selection"):
            return _select_beams(model, beams, sampled, scoring), None

    return jax.lax.scan(step, beams, None, length=steps)[0]


def _sample_candidates(
    beams: Beams,
    logits: Float[Array, "P B V"],
    is_bad: Bool[Array, "P B"],
    keys: Key[Array, " P"],
    scoring: Scoring,
    *,
    candidates: int,
) -> tuple[Int[Array, "P B K"], Float[Array, "P B K"], Int[Array, "P B K"]]:
    """Sample tokens to extend each beam; also returns the log-likelihoods and repeats of the extended answers.

    Candidates of beams with bad logits are never selected. The K largest values of log p / T + Gumbel noise are a
    sample without replacement (Kool et al., arXiv 1903.06059).
    """
    log_probs = jnp.where(is_bad[..., None], -jnp.inf, jax.nn.log_softmax(logits))
    noise = jax.vmap(lambda key: jax.random.gumbel(key, log_probs.shape[1:]))(keys)
    tokens = jax.lax.top_k(logits + scoring.sampling.temperature * noise, candidates)[1]
    # A repeat completes an n-gram of the answer: the n - 1 tokens before an earlier place equal the newest ones.
    follows = beams.matches >= scoring.repetition_ngram - 1
    is_repeat = ((beams.tokens[:, :, None] == tokens[..., None]) & follows[:, :, None]).any(axis=-1)
    log_likelihood = beams.log_likelihood[..., None] + jnp.take_along_axis(log_probs, tokens, axis=-1)
    return tokens, log_likelihood, beams.repeats[..., None] + is_repeat


def _select_beams(model: Model, beams: Beams, sampled: tuple[Array, Array, Array], scoring: Scoring) -> Beams:
    """Keep the best among extended and ended beams of each prompt, and feed the new tokens to the LM."""
    tokens, log_likelihood, repeats = sampled
    prompts, width, candidates = tokens.shape
    done, count = (column.reshape(prompts, width) for column in (beams.state.done, beams.state.count))
    extended = scoring.score(log_likelihood, repeats, jnp.broadcast_to(count[..., None] + 1, tokens.shape))
    ended = scoring.score(beams.log_likelihood, beams.repeats, beams.lengths)
    scores = jnp.where(done[..., None], -jnp.inf, extended)
    scores = jnp.concatenate([scores, jnp.where(done, ended, -jnp.inf)[..., None]], axis=2)
    best_scores, best = jax.lax.top_k(scores.reshape(prompts, -1), width)
    parents, column = best // (candidates + 1), best % (candidates + 1)
    is_old, prompt = column == candidates, jnp.arange(prompts)[:, None]
    place = (prompt, parents, jnp.minimum(column, candidates - 1))
    token = jnp.where(is_old, -1, tokens[place])
    is_empty = jnp.isneginf(best_scores)
    is_stop = (token[..., None] == scoring.stop_ids).any(axis=-1) | (count + 1 >= scoring.max_new_tokens)
    said, matches = beams.tokens[prompt, parents], beams.matches[prompt, parents]
    matches = jnp.where(said == token[..., None], matches + 1, 0)
    done, chosen = is_empty | is_old | is_stop, select(beams.state, (prompt * width + parents).reshape(-1))
    is_new = jnp.arange(said.shape[-1]) == count[..., None]
    return dataclasses.replace(
        beams,
        state=advance(model.llm, chosen, jnp.maximum(token, 0).reshape(-1), done.reshape(-1)),
        tokens=jnp.where(is_new, token[..., None], said),
        matches=jnp.roll(matches, 1, axis=2).at[..., 0].set(0),
        lengths=jnp.where(is_old, beams.lengths[prompt, parents], count + 1),
        repeats=jnp.where(is_old, beams.repeats[prompt, parents], repeats[place]),
        log_likelihood=jnp.where(
            is_empty, -jnp.inf, jnp.where(is_old, beams.log_likelihood[prompt, parents], log_likelihood[place])
        ),
    )
