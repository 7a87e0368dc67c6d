"""Variants of every config file: `configs/llama1b.py:dense,sigma_32` sets these options in order.

These variants fit any model: the rows of the paper's ablations and extensions, with its hyper-parameters. A variant of
one model, such as a slice of TPUs that holds it, is a function of that model's config file, and takes precedence over
one of the same name here. Two of these variants that set the same option to different values are refused; those of a
config file may be refined by any.
"""

from typing import Any

from l2d_jax.config.schema import CATEGORIES

RATES = {"optim.peak_rate": 1e-5, "optim.final_rate": 1e-6}
BASELINE = {**RATES, "train.own_estimates": 0.0}  # the language model itself, finetuned

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {  # by name: what it is, and the options that it sets
    # The path (paper section 3.2 and its ablations).
    "dense": (
        'The path in full ("full f_d"): copies of the LM\'s layers, which start from its weights, instead of LoRA.',
        {"path.layers": "dense"},
    ),
    "dense_scratch": (
        "The path in full, with layers that start from random values instead of the LM's weights.",
        {"path.layers": "dense", "path.dense_init": "scratch"},
    ),
    "width_16": (
        "A diffusion token of 16 entries instead of 256; the networks around it keep their widths, as in the release.",
        {"path.width": 16},
    ),
    "sigma_32": ("Noise with half the paper's standard deviation of 64.", {"path.sigma": 32.0}),
    "sigma_128": ("Noise with twice the paper's standard deviation of 64.", {"path.sigma": 128.0}),
    # Beyond the paper: a path that begins as the language model.
    "anchored": ("A path that untrained is the language model itself, at every budget.", {"path.start": "anchored"}),
    "reading": (
        "An anchored path that reads the context itself: the LM's layers do so with the path's updates.",
        {"path.start": "anchored", "path.reader": "path"},
    ),
    # Training.
    "own_estimates": (
        "Half of the positions are trained on x_t with the path's own first estimate, as in decoding, not the truth.",
        {"train.own_estimates": 0.5},
    ),
    "rate_1e5": ("A peak learning rate of 1e-5 instead of 1e-4, falling to the same 1e-6.", RATES),
    "rate_3e5": (
        "A peak learning rate of 3e-5 instead of 1e-4, falling to the same 1e-6.",
        {"optim.peak_rate": 3e-5, "optim.final_rate": 1e-6},
    ),
    # Baselines: the language model itself, finetuned.
    "lora": (
        "The paper's baseline: LoRA on the LM's q and v, rank 32, alpha 64, at a peak rate of 1e-5; no path.",
        {"train.method": "lora", **BASELINE},
    ),
    "full": (
        "The paper's baseline: all of the LM's weights, at a peak rate of 1e-5; no path.",
        {"train.method": "full", **BASELINE},
    ),
    # Density of the training times (uniform in the paper).
    "cosmap": (
        "Times that are densest at t = 1/2, as the release's `cosmap` draws them.",
        {"train.time_density": "cosmap"},
    ),
    "logit_normal": ("Times with a standard normal log(t / (1 - t)).", {"train.time_density": "logit_normal"}),
    "warped": (
        "Times with a density that follows the fall of the loss (CDCD's time warping).",
        {"train.time_density": "warped"},
    ),
    "guidance": (
        "Classes by the source of an example (math, coding, general_qa, other), for classifier-free guidance.",
        {"path.classes": len(CATEGORIES), "path.class_dropout": 0.2},
    ),
}
