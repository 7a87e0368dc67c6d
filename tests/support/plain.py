"""The diffusion path as the paper writes it: one position at a time, in float64 NumPy, nothing shared or stacked."""

import numpy as np

from l2d_jax.model.architecture import Architecture
from l2d_jax.model.diffusion_path import DiffusionPath
from l2d_jax.model.layers import Lora, Mlp, rope_frequencies
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
    keys: np.ndarray,  # [L, K, S, H], of the main path's tokens at the positions 0 to S - 1
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
        normed = norm(x, a, f64(w.attention_norm)[layer] + weight_1) + shift_1
        q = np.tensordot(normed, weight("q"), 1)
        if a.qkv_bias:
            q = q + f64(w.q_bias if own.q_bias is None else own.q_bias)[layer]
        heads = []
        for n in range(a.num_attention_heads):
            group = n // (a.num_attention_heads // a.num_key_value_heads)
            head = q[n] if w.q_norm is None else norm(q[n], a, f64(w.q_norm)[layer])
            kind = a.ropes[layer] if a.ropes else "global"
            turned = rotate(head, position, f64(rope_frequencies(a, kind))) * a.query_scale
            if kind == "global" and a.rope_scaling is not None:
                turned = turned * a.rope_scaling.attention_factor**2
            window = a.windows[layer] if a.windows else 0
            seen = slice(max(position + 1 - window, 0) if window else 0, position + 1)
            scores = f64(keys)[layer, group, seen] @ turned / np.sqrt(a.head_dim)
            shares = np.exp(scores) / np.exp(scores).sum()
            heads.append(shares @ f64(values)[layer, group, seen])
        added = np.tensordot(np.array(heads), weight("o"), 2)
        x = x + gate_1 * (norm(added, a, f64(w.post_attention_norm)[layer]) if a.output_norms else added)
        normed = norm(x, a, f64(w.mlp_norm)[layer] + weight_2) + shift_2
        activate = silu if a.activation == "silu" else gelu
        added = (activate(normed @ weight("gate")) * (normed @ weight("up"))) @ weight("down")
        x = x + gate_2 * (norm(added, a, f64(w.post_mlp_norm)[layer]) if a.output_norms else added)
    return x


def gelu(x: np.ndarray) -> np.ndarray:
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def norm(x: np.ndarray, architecture: Architecture, weight: np.ndarray) -> np.ndarray:
    return rms(x, architecture.rms_norm_eps) * (architecture.norm_offset + weight)


def rotate(q: np.ndarray, position: int, frequencies: np.ndarray) -> np.ndarray:
    half, angles = len(q) // 2, position * frequencies
    turned = (q[:half] + 1j * q[half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag])


def rms(x: np.ndarray, epsilon: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + epsilon)


def logits(llm: LLM, hidden: np.ndarray) -> np.ndarray:
    head = llm.embed if llm.head is None else llm.head
    return norm(f64(hidden), llm.architecture, f64(llm.norm)) @ f64(head).T


def f64(array: object) -> np.ndarray:
    return np.asarray(array, np.float64)
