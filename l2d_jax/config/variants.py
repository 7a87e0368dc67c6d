"""Variants of every config file: `configs/llama1b.py:dense,sigma_32` applies these functions in order.

These variants fit any model: the rows of the paper's ablations and extensions, with its hyper-parameters. A variant of
one model, such as a slice of TPUs that holds it, is a function of that model's config file, and takes precedence over
one of the same name here. Two of these variants that set the same option to different values are refused; those of a
config file may be refined by any.
"""

from ml_collections import ConfigDict

from l2d_jax.config.schema import CATEGORIES

# --- the path (paper section 3.2 and its ablations) ---


def dense(config: ConfigDict) -> None:
    """The path in full ("full f_d"): copies of the LM's layers, which start from its weights, instead of LoRA."""
    config.path.layers = "dense"


def dense_scratch(config: ConfigDict) -> None:
    """The path in full, with layers that start from random values instead of the LM's weights."""
    dense(config)
    config.path.dense_init = "scratch"


def width_16(config: ConfigDict) -> None:
    """A diffusion token of 16 entries instead of 256; the networks around it keep their widths, as in the release."""
    config.path.width = 16


def sigma_32(config: ConfigDict) -> None:
    """Noise with half the paper's standard deviation of 64."""
    config.path.sigma = 32.0


def sigma_128(config: ConfigDict) -> None:
    """Noise with twice the paper's standard deviation of 64."""
    config.path.sigma = 128.0


# --- training ---


def rate_1e5(config: ConfigDict) -> None:
    """A peak learning rate of 1e-5 instead of 1e-4, falling to the same 1e-6."""
    config.optim.peak_rate = 1e-5
    config.optim.final_rate = 1e-6


def rate_3e5(config: ConfigDict) -> None:
    """A peak learning rate of 3e-5 instead of 1e-4, falling to the same 1e-6."""
    config.optim.peak_rate = 3e-5
    config.optim.final_rate = 1e-6


# --- baselines: the language model itself, finetuned ---


def lora(config: ConfigDict) -> None:
    """The paper's baseline: LoRA on the LM's q and v, rank 32, alpha 64, at a peak rate of 1e-5; no path."""
    config.train.method = "lora"
    rate_1e5(config)


def full(config: ConfigDict) -> None:
    """The paper's baseline: all of the LM's weights, at a peak rate of 1e-5; no path."""
    config.train.method = "full"
    rate_1e5(config)


# --- density of the training times (uniform and independent in the paper) ---


def cosmap(config: ConfigDict) -> None:
    """Times that are densest at t = 1/2, as the release's `cosmap` draws them."""
    config.train.time_density = "cosmap"


def logit_normal(config: ConfigDict) -> None:
    """Times with a standard normal log(t / (1 - t))."""
    config.train.time_density = "logit_normal"


def warped(config: ConfigDict) -> None:
    """Times with a density that follows the fall of the loss (CDCD's time warping)."""
    config.train.time_density = "warped"


def stratified(config: ConfigDict) -> None:
    """Times that cover their density evenly, in each answer and in the whole batch."""
    config.train.stratified_times = True


# --- guidance (paper section 3.3) ---


def guidance(config: ConfigDict) -> None:
    """Classes by the source of an example (math, coding, general_qa, other), for classifier-free guidance."""
    config.path.classes = len(CATEGORIES)
    config.path.class_dropout = 0.2  # probability, per position, of the null class
