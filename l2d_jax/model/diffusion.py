"""The mathematics of L2D as functions of arrays (paper section 3; symbols of the paper: x_t, t, V_y, sigma)."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from l2d_jax.distributed.sharding import axis_size, constrain, platform

SAMPLE = "sample_tokens"  # scope of what runs only at a temperature above 0
END = 1e-6  # closer to t = 1 than this, the velocity (x̂ - x_t) / (1 - t) counts as zero


def normalize(v: Float[Array, "*B C"]) -> Float[Array, "*B C"]:
    """Rescale vectors to length sqrt(C), so that each entry is of order one (section 3.2, vocabulary vectors)."""
    v = v.astype(jnp.float32)
    squares = jnp.sum(jnp.square(v), axis=-1, keepdims=True)
    # Embedding tables have rows of zeros for unused tokens, where the gradient of the root would be NaN.
    return v * (v.shape[-1] ** 0.5 / jnp.sqrt(jnp.where(squares > 0, squares, 1.0)))


def interpolate(data: Float[Array, "*B C"], noise: Float[Array, "*B C"], t: Float[Array, "*B"]) -> Float[Array, "*B C"]:
    """The corrupted token x_t = t x_1 + (1 - t) x_0 (equation 2); `noise` already has standard deviation sigma."""
    t = t[..., None]
    return t * data + (1 - t) * noise


def scale_input(x: Float[Array, "*B C"], t: Float[Array, "*b"], sigma: float) -> Float[Array, "*B C"]:
    """Scale x_t to unit variance: divide by sqrt((1 - t)^2 sigma^2 + t^2), in float32."""
    t = t.astype(jnp.float32)[..., None]
    return x.astype(jnp.float32) / jnp.sqrt(jnp.square((1 - t) * sigma) + jnp.square(t))


def time_features(t: Float[Array, "*B"], width: int) -> Float[Array, "*B F"]:
    """[cos(t w_i), sin(t w_i)] with w_i = 10000^(-2i / width), t in [0, 1] unscaled, in float32."""
    half = width // 2
    frequency = jnp.exp(-jnp.log(10000.0) * jnp.arange(half, dtype=jnp.float32) / half)
    angle = t.astype(jnp.float32)[..., None] * frequency
    return jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1)


def guide(
    conditional: Float[Array, "*B C"], null: Float[Array, "*B C"], strength: Float[Array, "..."]
) -> Float[Array, "*B C"]:
    """Classifier-free guidance: w x̂(class) + (1 - w) x̂(null). It mixes the two velocities in the same way.

    The released code has this form. The sign of the second term in the paper's formula is a slip.
    """
    return strength * conditional + (1 - strength) * null


def anneal(temperature: Float[Array, "*#B"], t: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """The annealed temperature of the velocity: it falls linearly to zero as t goes to one."""
    return temperature * jnp.clip(1 - t, 0.0, 1.0)


def sample_token(key: Array, logits: Float[Array, "*B V"], temperature: Float[Array, "*b"]) -> Array:
    """Sample a token from softmax(logits / temperature); the arg max where the temperature is zero."""
    temperature = temperature[..., None]
    noise = jax.random.gumbel(key, logits.shape, jnp.float32)
    return arg_max(logits + jnp.where(temperature > 0, temperature * noise, 0.0))


def sample_rows(keys: Array, logits: Float[Array, "n V"], temperature: Float[Array, " n"]) -> Array:
    """`sample_token` for each row with its own key; makes no noise over the vocabulary if no row needs it."""
    with jax.named_scope(SAMPLE):
        return jax.lax.cond(
            (temperature > 0).any(), lambda: jax.vmap(sample_token)(keys, logits, temperature), lambda: arg_max(logits)
        )


def arg_max(logits: Float[Array, "*B V"]) -> Int[Array, "*B"]:
    """`jnp.argmax` over the last axis. On CPUs: first the best block, then the best entry, 20 times as fast.

    Where devices share the vocabulary, each finds its best entry: XLA would move the logits between them.
    """
    size, devices = math.gcd(logits.shape[-1], 128), axis_size("tensor") * axis_size("stationary")
    if platform() != "cpu" and devices > 1 and logits.shape[-1] % devices == 0:
        blocks = logits.reshape(*logits.shape[:-1], devices, -1)
        others = ["parts"] * (logits.ndim - 2)
        blocks = constrain(blocks, *["gathered_batch"][: logits.ndim - 1], *others, "vocab", "hidden")
        best, inside = blocks.max(axis=-1), jnp.argmax(blocks, axis=-1)
        block = jnp.argmax(best, axis=-1)
        return block * blocks.shape[-1] + jnp.take_along_axis(inside, block[..., None], axis=-1)[..., 0]
    if platform() != "cpu" or size == 1:
        return jnp.argmax(logits, axis=-1)
    blocks = logits.reshape(*logits.shape[:-1], -1, size)
    best = jnp.argmax(jnp.max(blocks, axis=-1), axis=-1, keepdims=True)
    inside = jnp.take_along_axis(blocks, best[..., None], axis=-2)[..., 0, :]
    return best[..., 0] * size + jnp.argmax(inside, axis=-1)
