"""The diffusion path as the paper writes it: one position at a time, in float64 NumPy, nothing shared or stacked."""

import numpy as np

from l2d_jax.model.diffusion_path import DiffusionPath
from l2d_jax.model.layers import Lora, Mlp
from l2d_jax.model.llm import LLM


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def mlp(module: Mlp, x: np.ndarray, layer: tuple[int, ...] = ()) -> np.ndarray:
    first, last = module.first, module.last
    hidden = silu(x @ f64(first.weight)[layer] + f64(first.bias)[layer])
    return np.tensordot(hidden, f64(last.weight)[layer], 1) + f64(last.bias)[layer]


def condition(path: DiffusionPath, t: float, label: int | None) -> np.ndarray:
    half = path.config.frequency_width // 2
    angles = [t * 10000 ** (-i / half) for i in range(half)]
    embedded = mlp(path.time, np.concatenate([np.cos(angles), np.sin(angles)]))
    if path.classes is None:
        return embedded
    return embedded + f64(path.classes)[-1 if label is None else label]


def merge_weight(path: DiffusionPath, t: float, label: int | None) -> np.ndarray:
    return mlp(path.merge, condition(path, t, label)) - mlp(path.merge, condition(path, 0.0, label))


def features(
    path: DiffusionPath,
    llm: LLM,
    x: np.ndarray,  # [C]
    t: float,
    label: int | None,
    position: int,
    keys: np.ndarray,  # [L, S, K, H], of the main path's tokens at the positions 0 to S - 1
    values: np.ndarray,
) -> np.ndarray:
    """f_d of one diffusion token."""
    a, w, own = llm.architecture, llm.layers, path.layers
    x = mlp(path.translation, f64(x) / np.sqrt((1 - t) ** 2 * path.config.sigma**2 + t**2))
    for layer in range(a.num_hidden_layers):

        def weight(name: str, layer: int = layer) -> np.ndarray:
            theirs, ours = f64(getattr(w, name))[layer], getattr(own, name)
            if not isinstance(ours, Lora):
                return f64(ours)[layer]
            update = np.tensordot(f64(ours.a)[layer], f64(ours.b)[layer], 1)
            return theirs + path.config.lora_alpha / path.config.lora_rank * update

        weight_1, shift_1, gate_1, weight_2, shift_2, gate_2 = mlp(own.modulation, condition(path, t, label), (layer,))
        normed = rms(x, a.rms_norm_eps) * (f64(w.attention_norm)[layer] + weight_1) + shift_1
        q = np.tensordot(normed, weight("q"), 1)
        if a.qkv_bias:
            q = q + f64(w.q_bias if own.q_bias is None else own.q_bias)[layer]
        heads = []
        for n in range(a.num_attention_heads):
            group = n // (a.num_attention_heads // a.num_key_value_heads)
            turned = rotate(q[n], position, a.rope_theta)
            scores = f64(keys)[layer, : position + 1, group] @ turned / np.sqrt(a.head_dim)
            shares = np.exp(scores) / np.exp(scores).sum()
            heads.append(shares @ f64(values)[layer, : position + 1, group])
        x = x + gate_1 * np.tensordot(np.array(heads), weight("o"), 2)
        normed = rms(x, a.rms_norm_eps) * (f64(w.mlp_norm)[layer] + weight_2) + shift_2
        x = x + gate_2 * ((silu(normed @ weight("gate")) * (normed @ weight("up"))) @ weight("down"))
    return x


def rotate(q: np.ndarray, position: int, theta: float) -> np.ndarray:
    half = len(q) // 2
    angles = position * theta ** (-np.arange(half) / half)
    turned = (q[:half] + 1j * q[half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag])


def rms(x: np.ndarray, epsilon: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + epsilon)


def logits(llm: LLM, hidden: np.ndarray) -> np.ndarray:
    head = llm.embed if llm.head is None else llm.head
    return rms(f64(hidden), llm.architecture.rms_norm_eps) * f64(llm.norm) @ f64(head).T


def f64(array: object) -> np.ndarray:
    return np.asarray(array, np.float64)
