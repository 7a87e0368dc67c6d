"""Tiny GGUF files, written by `gguf` itself: random weights, and a tokenizer of bytes and a few merges."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDTH, LAYERS = 32, 4, 2, 8, 64, 2
SPECIAL = ["<|begin|>", "<|end|>", "<|pad|>"]
MERGES = ["1 2", "12 3", "h i", "Ġ hi"]
# The 256 characters of byte-level BPE, whatever their order.
BYTES = [chr(b) if chr(b).isprintable() and b != 32 and b != 173 else None for b in range(256)]
ALPHABET = [c or chr(256 + [i for i, x in enumerate(BYTES) if x is None].index(b)) for b, c in enumerate(BYTES)]
TOKENS = [*ALPHABET, "12", "123", "hi", "Ġhi", *SPECIAL, "<tool>", "[PAD264]"]
KINDS = [1] * (len(TOKENS) - 5) + [3, 3, 3, 4, 5]
TEMPLATE = "{% for m in messages %}<|begin|>{{ m['content'] }}<|end|>{% endfor %}"


def example_weights(architecture: str, *, tied: bool) -> dict[str, np.ndarray]:
    """A random model under Hugging Face's names."""
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (len(TOKENS), HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not tied:
        shapes["lm_head.weight"] = (len(TOKENS), HIDDEN)
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        rows = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
        shapes |= {f"{layer}.self_attn.{x}_proj.weight": (n, HIDDEN) for x, n in rows.items()}
        if architecture == "qwen2":
            shapes |= {f"{layer}.self_attn.{x}_proj.bias": (n,) for x, n in rows.items()}
        if architecture == "qwen3":
            shapes |= {f"{layer}.self_attn.{x}_norm.weight": (HEAD_DIM,) for x in "qk"}
        shapes |= {f"{layer}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM)}
        shapes |= {f"{layer}.mlp.{x}_proj.weight": (WIDTH, HIDDEN) for x in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj.weight": (HIDDEN, WIDTH)}
        shapes |= {f"{layer}.{x}_layernorm.weight": (HIDDEN,) for x in ("input", "post_attention")}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def llama_cpp_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of rows, element by element: row 2i + j of a head is row j * half + i of Hugging Face's."""
    out, half = np.empty_like(weight), weight.shape[0] // heads // 2
    for head in range(heads):
        for i in range(half):
            for j in range(2):
                out[(head * half + i) * 2 + j] = weight[(head * 2 + j) * half + i]
    return out


def to_gguf_name(name: str) -> str:
    for theirs, ours in {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
        "self_attn.o_proj": "attn_output",
        "self_attn.": "attn_",
        "mlp.": "ffn_",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "_proj": "",
    }.items():
        name = name.replace(theirs, ours)
    return name


def write_gguf(
    path: Path,
    architecture: str = "llama",
    *,
    tied: bool = True,
    pre: str = "smollm",
    quantisation: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray | None] | None = None,
) -> dict[str, np.ndarray]:
    """Write a tiny model; `metadata` and `tensors` take the place of what would be written (None: leave out)."""
    weights = example_weights(architecture, tied=tied)
    writer = gguf.GGUFWriter(path, architecture)
    values = {
        f"{architecture}.block_count": LAYERS,
        f"{architecture}.context_length": 128,
        f"{architecture}.embedding_length": HIDDEN,
        f"{architecture}.feed_forward_length": WIDTH,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.key_length": HEAD_DIM,
        f"{architecture}.attention.head_count_kv": KV_HEADS,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{architecture}.rope.freq_base": 5e5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": KINDS,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": TOKENS.index(SPECIAL[0]),
        "tokenizer.ggml.eos_token_id": TOKENS.index(SPECIAL[1]),
        "tokenizer.ggml.padding_token_id": TOKENS.index(SPECIAL[2]),
        "tokenizer.chat_template": TEMPLATE,
    } | (metadata or {})
    for key, value in values.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    arrays: dict[str, np.ndarray | None] = {}
    for name, weight in weights.items():
        heads = HEADS if "q_proj.weight" in name else KV_HEADS if "k_proj.weight" in name else 0
        reordered = architecture in ("llama", "smollm3") and heads
        arrays[to_gguf_name(name)] = llama_cpp_rows(weight, heads) if reordered else weight
    for name, array in (arrays | (tensors or {})).items():
        if array is None:
            continue
        kind = quantisation if array.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights
