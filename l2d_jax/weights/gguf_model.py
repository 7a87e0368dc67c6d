"""Converts a GGUF file of a Llama, Qwen 2 or 3, or SmolLM3 to Hugging Face's format: config, weights and tokenizer.

Notable:
* llama.cpp reorders the rows of q and k of llama and smollm3, because it rotates neighbours and Hugging Face rotates
  halves (its convert_hf_to_gguf.py, `LlamaModel.permute`). This is undone here. Qwen's rows are not reordered.
* The file does not say which of SmolLM3's layers have no rope: every fourth, as in llama.cpp.
* Llama 3's rope scaling is not in the metadata but in a tensor of divisors, from which the factor is recovered.
* The file has only the name of its pre-tokenizer; the three here are those of the published tokenizer.json files.
"""

import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import gguf
import numpy as np
import tokenizers
from jaxtyping import Float
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

from l2d_jax.errors import InputError, require, shown
from l2d_jax.model.architecture import SUPPORTED, Architecture
from l2d_jax.weights import mapping
from l2d_jax.weights.gguf_file import GGUFFile

Dtype = Literal["bfloat16", "float32"]
CONVERSION = 1  # raise it when a file converts to something else than before

KNOWN = ("llama", "qwen2", "qwen3", "smollm3")
ARCHITECTURES = {family.model_type: name for name, family in SUPPORTED.items() if family.model_type in KNOWN}
REORDERED = ("llama", "smollm3")
HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}  # number of heads of reordered matrices
ROPE_DIVISORS = "rope_freqs.weight"

_WORDS = (  # pre-tokenizers of Llama 3 and Qwen 2.5, which differ in the number of digits per word
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = {"smollm": None, "llama-bpe": _WORDS % "{1,3}", "qwen2": _WORDS % ""}
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # kinds of tokens; all others are plain


def read_documents(file: GGUFFile, dtype: Dtype) -> dict[str, str]:
    """The text files of a Hugging Face folder, keyed by file name; raises `InputError` for unsupported models."""
    config = _config(file)
    tokens = file.get("tokenizer.ggml.tokens", list)
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    values = {token: file.find(f"tokenizer.ggml.{name}_token_id", int) for token, name in names.items()}
    ids = {token: i for token, i in values.items() if i is not None}
    rows = config["vocab_size"]
    if not 0 < len(tokens) <= rows or not all(0 <= i < len(tokens) for i in ids.values()):
        raise InputError(f"{file.path}: {len(tokens)} tokens do not fit token ids {ids} and {rows} rows")
    generation = {f"{token}_id": i for token, i in ids.items() if token != "unk_token"}
    words: dict[str, Any] = {token: tokens[i] for token, i in ids.items()}
    words |= {"model_max_length": config["max_position_embeddings"], "clean_up_tokenization_spaces": False}
    words |= {"tokenizer_class": "PreTrainedTokenizerFast"}  # a named class would replace our pre-tokenizer
    template = file.find("tokenizer.chat_template", str)
    words |= {"chat_template": template} if template else {}
    documents = {"generation_config.json": generation, "tokenizer_config.json": words}
    documents |= {"config.json": config | generation | {"torch_dtype": dtype}}
    texts = {name: json.dumps(value, indent=2, ensure_ascii=False) + "\n" for name, value in documents.items()}
    return texts | {"tokenizer.json": _tokenizer(file).to_str()}


def read_weights(file: GGUFFile, dtype: Dtype) -> Iterator[tuple[str, Callable[[], Float[np.ndarray, "..."]]]]:
    """Yield Hugging Face's name of each tensor and a function that reads it; `InputError` if one does not fit."""
    config = _config(file)
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH[config["model_type"].upper()], config["num_hidden_layers"])
    shapes = mapping.llm_shapes(Architecture.from_hf(config))
    table = {known.get_name(target, (".weight", ".bias")) or target: target for target in shapes}
    missing = table.keys() - file.tensors.keys()
    unknown = file.tensors.keys() - table.keys() - ({ROPE_DIVISORS} if config["rope_scaling"] else set())
    for problem, names in (("lacks", missing), ("has unknown", unknown)):
        if names:
            first = ", ".join(sorted(names)[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
            raise InputError(f"{file.path} {problem} tensors for architecture {config['model_type']}: {first}")
    for name, target in table.items():
        if file.shape(name) != shapes[target]:
            raise InputError(f"{file.path}: {name} must have shape {shapes[target]}, got {file.shape(name)}")

    def read(name: str, target: str) -> Float[np.ndarray, "..."]:
        values = file.read(name)
        heads = HEADS.get(target.split(".")[-2]) if config["model_type"] in REORDERED else None
        if heads is not None:  # undo llama.cpp's interleaving of the two halves of each head's rows
            values = values.reshape(config[heads], -1, 2, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
        return values.astype(dtype)

    return ((target, partial(read, name, target)) for name, target in table.items())


def _config(file: GGUFFile) -> dict[str, Any]:
    """The keys of config.json that depend on neither tokenizer nor dtype."""
    architecture = file.get("general.architecture", str)
    supported = f"supported are {', '.join(ARCHITECTURES)}"
    require(architecture in ARCHITECTURES, f"{file.path} is of architecture {shown(architecture)}: {supported}")
    if (parts := file.find("split.count", int) or 1) != 1:
        raise InputError(f"{file.path} is one of {parts} parts: join them with llama-gguf-split --merge")

    def count(key: str, default: int | None = None) -> int:
        key = f"{architecture}.{key}"
        value = file.get(key, int) if default is None or key in file.metadata else default
        require(0 < value < 2**31, f"{file.path}: metadata {key} must be positive, got {value}")
        return value

    def number(value: float) -> float:  # 1e-5 for the float32 9.99999974e-06
        return float(str(np.float32(value)))

    hidden, heads, layers = count("embedding_length"), count("attention.head_count"), count("block_count")
    head_dim = count("attention.key_length", count("rope.dimension_count", max(hidden // heads, 1)))
    for key in ("rope.dimension_count", "attention.value_length"):
        if count(key, head_dim) != head_dim or head_dim % 2:
            raise InputError(f"{file.path}: {key} {count(key, head_dim)} must be the head's width {head_dim}, and even")
    if layers > len(file.tensors):  # before a loop over the layers
        raise InputError(f"{file.path} claims {layers} layers and has {len(file.tensors)} tensors: download it again")
    if (scaling := file.find(f"{architecture}.rope.scaling.type", str)) not in (None, "none"):
        raise InputError(f"{file.path}: rope scaling {shown(scaling)} is not supported (Llama 3's and none are)")
    if file.find(window := f"{architecture}.attention.sliding_window", int):
        raise InputError(f"{file.path}: {window} is not supported: take the model's own folder")
    theta = file.find(f"{architecture}.rope.freq_base", float)
    theta = 10000.0 if theta is None else number(theta)
    config = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": count("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": file.shape("token_embd.weight")[0] if "token_embd.weight" in file.tensors else 1,
        "max_position_embeddings": count("context_length"),
        "rms_norm_eps": number(file.get(f"{architecture}.attention.layer_norm_rms_epsilon", float)),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(file, theta, head_dim) if architecture == "llama" else None,
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    Architecture.from_hf(config, where=file.path)  # the ranges that it declares
    return config


def _rope_scaling(file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any] | None:
    """Llama 3's rope scaling; its factor is recovered from the tensor of frequency divisors."""
    if ROPE_DIVISORS not in file.tensors:
        return None
    divisors = file.read(ROPE_DIVISORS)
    turns = 8192 * theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)  # over the original context
    smooth = np.clip((turns - 1) / (4 - 1), 0, 1)  # low and high frequency factors 1 and 4
    for factor in (8.0, 32.0):  # Llama 3.1 and 3.2
        expected = 1 / ((1 - smooth) / factor + smooth)
        if divisors.shape == expected.shape and np.allclose(divisors, expected, rtol=1e-4, atol=0):
            scaling = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
            return {"rope_type": "llama3", "factor": factor} | scaling
    raise InputError(f"{file.path}: {ROPE_DIVISORS} is not Llama 3's rope scaling by 8 or 32, which alone is supported")


def _tokenizer(file: GGUFFile) -> tokenizers.Tokenizer:
    model, pre = file.get("tokenizer.ggml.model", str), file.get("tokenizer.ggml.pre", str)
    if model != "gpt2" or pre not in PRE_TOKENIZERS:
        named = f"tokenizer {shown(model)} with pre-tokenizer {shown(pre)}"
        raise InputError(f"{file.path}: {named}; supported: 'gpt2' with {', '.join(map(repr, PRE_TOKENIZERS))}")
    tokens, merges = file.get("tokenizer.ggml.tokens", list), file.get("tokenizer.ggml.merges", list)
    kinds = file.get("tokenizer.ggml.token_type", list)
    try:
        used = [(token, i) for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != UNUSED]
        if len(dict(used)) < len(used):
            raise ValueError("a token is repeated")
        pairs = [tuple(merge.split(" ")) for merge in merges]
        tokenizer = tokenizers.Tokenizer(models.BPE(dict(used), pairs, ignore_merges=pre == "llama-bpe"))
    except Exception as error:  # tokenizers raises no narrower type
        reason = str(error).partition("\n")[0]
        raise InputError(f"{file.path}: tokens, token_type and merges make no tokenizer ({reason})") from None
    words = PRE_TOKENIZERS[pre]
    split = pre_tokenizers.Split(Regex(words), "isolated") if words else pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words is None)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in (CONTROL, USER_DEFINED):
            tokenizer.add_tokens([tokenizers.AddedToken(token, special=kind == CONTROL, normalized=False)])
    add_bos = file.find("tokenizer.ggml.add_bos_token", bool)
    bos = file.find("tokenizer.ggml.bos_token_id", int)
    steps: list[processors.PostProcessor] = [processors.ByteLevel(trim_offsets=False)]
    if bos is not None and (pre == "llama-bpe" if add_bos is None else add_bos):
        text = tokens[bos]
        steps.append(processors.TemplateProcessing(f"{text} $A", f"{text} $A {text}:1 $B:1", [(text, bos)]))
    tokenizer.post_processor = processors.Sequence(steps)
    return tokenizer
