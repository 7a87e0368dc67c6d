"""The files of models, of runs and of what was trained: a small good one of each kind, and its readers."""

import dataclasses
import hashlib
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from l2d_jax import loading
from l2d_jax.config.schema import Config, ModelConfig
from l2d_jax.data import tokenizer
from l2d_jax.files import read_json
from l2d_jax.model.architecture import Architecture
from l2d_jax.programs.convert import import_model
from l2d_jax.training import workdir
from l2d_jax.weights import base_model, digests, gguf_model, mapping, model_folder, peft, peft_config, publish
from l2d_jax.weights.gguf_file import GGUFFile
from l2d_jax.weights.safetensors_file import SafetensorsFolder, write_safetensors
from tests.support import mutations, programs, tiny
from tests.support.fuzz import Kind, Values
from tests.support.tiny_gguf import write_gguf
from tests.support.turns import encode_turns

MESSAGES = [{"role": "user", "content": "Hi 12?"}, {"role": "assistant", "content": "It's été, 123\n"}]
SCALING = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FOREIGN = "a number of someone else's file that is in range"
TEXT = "text that a tokenizer could have"


def _digest(arrays: Any) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)).hexdigest()


def flat(config: Any, prefix: str = "") -> Values:
    values = dataclasses.asdict(config)
    return {f"{prefix}{section}.{name}": v for section, part in values.items() for name, v in part.items()}


# Language models


def _write_base(folder: Path, *, text: bool, sharded: bool = False) -> None:
    programs.write_base(
        folder / "base",
        text=text,
        rope_scaling=SCALING | {"original_max_position_embeddings": 64},
        eos_token_id=258,
        bos_token_id=257,
        initializer_range=0.02,
        torch_dtype="float32",
        use_cache=True,
    )
    (folder / "base" / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [258, 5], "bos_token_id": 257, "temperature": 0.6, "do_sample": True})
    )
    if sharded:
        (folder / "base" / "model.safetensors").unlink()
        write_safetensors(folder / "base", programs.base_tensors().items(), max_shard_bytes=30_000)


def _read_base(folder: Path) -> Values:
    base = base_model.find_base(ModelConfig(name=str(folder / "base"), dtype="float32"))
    assert base.source is not None
    assert all(0 <= token < base.architecture.vocab_size for token in base.stop_ids)
    names = sorted(base.source.records.keys() - {"lm_head.weight"})
    weights = _digest(base.source.read(name) for name in names)
    kinds = sorted({str(base.source.records[name].dtype) for name in names})
    return {**vars(base.architecture), "stop_ids": base.stop_ids, "weights": weights, "types": kinds}


def _read_text(folder: Path) -> Values:
    base = base_model.find_base(ModelConfig(name=str(folder / "base"), dtype="float32"))
    found = base.tokenizer
    assert found is not None
    turns = encode_turns(MESSAGES, found)
    prompt = tokenizer.prompt_ids(MESSAGES[:1], found)
    plain = tokenizer.text_ids(["Hi 12!", "été \N{SNOWMAN}\n"], found)
    ids = [*prompt, *plain[0], *plain[1], *turns[0].context, *turns[0].answer, *base.stop_ids]
    ids.append(tokenizer.padding_id(found))
    assert all(0 <= token < base.architecture.vocab_size for token in ids), "an id beyond the vocabulary"
    return {"ids": ids, "text": found.decode(list(range(0, 259, 7)) + plain[0])}


def _kind_of_base(
    file: str, mutate: mutations.Mutation, *declared: str, text: bool = False, why: str = FOREIGN
) -> Kind:
    read = _read_text if text else _read_base
    return Kind(partial(_write_base, text=text), f"base/{file}", mutate, read, dict.fromkeys(declared, why))


def _write_template(folder: Path) -> None:
    _write_base(folder, text=True)
    programs.remove_template(folder / "base")
    (folder / "base" / "chat_template.jinja").write_text(tokenizer.CHATML)


def _write_special(folder: Path) -> None:
    _write_base(folder, text=True)
    tokens = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>", "special": True}}
    (folder / "base" / "special_tokens_map.json").write_text(json.dumps(tokens | {"pad_token": "<|pad|>"}))


# What was trained


def _write_adapter(folder: Path) -> None:
    config = peft.AdapterConfig(3, 6.0, ("q_proj", "v_proj"))
    rng = np.random.default_rng(0)
    shapes = peft.adapter_shapes(config, tiny.architecture("llama"))
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    peft.write_adapter(folder, config, tensors, base="org/base")
    programs.write_base(folder / "base", text=False, **tiny.CONFIGS["llama"])
    source = SafetensorsFolder.open(folder / "base")
    digests.sign(folder / peft.WEIGHTS, base_fingerprint=digests.source_fingerprint(source))


def _read_adapter(folder: Path) -> Values:
    adapter = peft.Adapter.open(folder, tiny.architecture("llama"))
    digests.check_signature(folder / peft.WEIGHTS, SafetensorsFolder.open(folder / "base"))
    product = adapter.product("model.layers.0.self_attn.q_proj", (slice(None), slice(None)))
    weights = _digest(adapter.source.read(name) for name in sorted(adapter.source.records))
    types = sorted({str(record.dtype) for record in adapter.source.records.values()})
    assert np.isfinite(product).all()
    return {**vars(adapter.config), "weights": weights, "types": types}


def _write_path(folder: Path) -> None:
    programs.write_base(folder / "base", text=False, **tiny.CONFIGS["llama"])
    base = base_model.find_base(ModelConfig(name=str(folder / "base")))
    model_folder.save_path(folder, tiny.path(), base=str(folder / "base"), base_fingerprint=base.fingerprint)


def _read_path(folder: Path) -> Values:
    base = base_model.find_base(ModelConfig(name=model_folder.base_name(folder)))
    config, source = model_folder.find_path(folder, base.architecture)
    model_folder.check_trained_path(folder, base)
    weights = _digest(source.read(name) for name in sorted(source.records))
    return {**vars(config), "weights": weights}


def _write_workdir(folder: Path) -> None:
    programs.write_base(folder / "base", text=False)
    config = programs.config(model__name=folder / "base", model__architecture=None)
    workdir.claim(folder / "run", config)
    base = base_model.find_base(config.model)
    base_model.record_base(folder / "run", config.model, base.fingerprint)
    (folder / "run" / "checkpoints").mkdir()


def _write_moved_workdir(folder: Path) -> None:
    """Whose base is found by the record of its place alone."""
    _write_workdir(folder)
    file = folder / "run" / "config.json"
    file.write_text(file.read_text().replace(json.dumps(str(folder / "base")), '"gone/base"'))


def _read_workdir(folder: Path) -> Values:
    found = loading.find(folder / "run")
    assert found.trained is not None
    assert Config.from_dict(json.loads(json.dumps(found.trained.to_dict(), allow_nan=False))) == found.trained
    workdir.claim(folder / "run", found.trained)
    record = folder / "run" / base_model.BASE
    found.find_base().require_same(read_json(record).get("base_fingerprint"), file=record)
    return flat(found.trained)


def _write_published(folder: Path) -> None:
    """As `publish.write_torch_folder` does, which needs PyTorch."""
    programs.write_base(folder / "base", text=False, **tiny.CONFIGS["llama"])
    path = tiny.path()
    config = {"model_type": "l2d", "base_model_name_or_path": "base", "base_revision": None, "path": vars(path.config)}
    config |= {"text_config": tiny.CONFIGS["llama"], "stop_ids": [2]}
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder, mapping.tensors(path, publish.TORCH_ROWS))


def _read_published(folder: Path) -> Values:
    found = loading.find(folder)
    opened = publish.TorchFolder.open(folder)
    base = found.find_base()
    model_folder.check_trained_path(folder, base)
    return {**vars(opened.config), **base.architecture.options(), "base": opened.base}


def _write_release(folder: Path) -> None:
    programs.write_release(folder, "llama")


def _read_release(folder: Path) -> Values:
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    import_model(str(folder / "base"), out, l2d=(folder / "l2d.safetensors", folder / "l2d.json"))
    return vars(model_folder.read_path_config(out))


OPTIONS = dict.fromkeys([*flat(programs.config())], "an option of a run, in range: no checksum")


def _read_gguf(folder: Path) -> Values:
    file = GGUFFile.open(folder / "x.gguf")
    texts = gguf_model.read_documents(file, "float32")
    weights = {name: read() for name, read in gguf_model.read_weights(file, "float32")}
    values = json.loads(texts["config.json"]) | {"texts": [texts[name] for name in sorted(texts)]}
    Architecture.from_hf(json.loads(texts["config.json"]))
    values["places"] = sorted((tensor.data_offset, tensor.n_bytes) for tensor in file.tensors.values())
    return values | {"weights": _digest(weights[name] for name in sorted(weights))}


GGUF_PARTS = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
GGUF_NAMES = [f"blk.{i}.{part}.weight" for i in range(2) for part in GGUF_PARTS]
GGUF_NAMES += ["token_embd.weight", "output_norm.weight"]
GGUF_DECLARED = dict.fromkeys(["max_position_embeddings", "rms_norm_eps", "rope_theta", "texts"], FOREIGN)
GGUF_DECLARED |= dict.fromkeys(["bos_token_id", "eos_token_id", "pad_token_id"], "a token of the vocabulary")
GGUF_DECLARED["weights"] = "two tensors of one shape under exchanged names"


MODEL_KINDS = {
    "config.json": _kind_of_base(
        "config.json",
        mutations.of_json_or_bytes,
        *("rms_norm_eps", "rope_theta", "rope_scaling", "max_position_embeddings", "stop_ids"),
    ),
    "generation_config.json": _kind_of_base("generation_config.json", mutations.of_json_or_bytes, "stop_ids"),
    "tokenizer.json": _kind_of_base("tokenizer.json", mutations.of_json_or_bytes, "ids", "text", text=True, why=TEXT),
    "tokenizer_config.json": _kind_of_base(
        "tokenizer_config.json", mutations.of_json_or_bytes, "ids", "text", text=True, why=TEXT
    ),
    "special_tokens_map.json": Kind(
        _write_special,
        "base/special_tokens_map.json",
        mutations.of_json_or_bytes,
        _read_text,
        {"ids": TEXT, "text": TEXT},
    ),
    "chat_template.jinja": Kind(
        _write_template, "base/chat_template.jinja", mutations.of_bytes, _read_text, {"ids": "a template's words"}
    ),
    "model.safetensors": _kind_of_base(
        "model.safetensors", mutations.of_safetensors_header, "weights", why="exchanged names or types of one size"
    ),
    "model.safetensors.index.json": Kind(
        partial(_write_base, text=False, sharded=True),
        "base/model.safetensors.index.json",
        mutations.of_json_or_bytes,
        _read_base,
    ),
    "adapter_config.json": Kind(
        _write_adapter,
        peft_config.CONFIG,
        mutations.of_json_or_bytes,
        _read_adapter,
        {"alpha": FOREIGN, "rank_stabilized": FOREIGN},
    ),
    "adapter_model.safetensors": Kind(_write_adapter, peft.WEIGHTS, mutations.of_safetensors_header, _read_adapter),
    "fingerprint.json": Kind(_write_adapter, digests.SIGNATURE, mutations.of_json_or_bytes, _read_adapter),
    "path.json": Kind(_write_path, "path.json", mutations.of_json_or_bytes, _read_path),
    "path.safetensors": Kind(_write_path, "path.safetensors", mutations.of_safetensors_header, _read_path),
    "path.safetensors, all of it": Kind(_write_path, "path.safetensors", mutations.of_bytes, _read_path),
    "workdir's config.json": Kind(
        _write_workdir, "run/config.json", mutations.of_json_or_bytes, _read_workdir, OPTIONS
    ),
    "published config.json": Kind(
        _write_published,
        "config.json",
        mutations.of_json_or_bytes,
        _read_published,
        dict.fromkeys(
            ("lora_alpha", "sigma", "time_scale", "rms_norm_eps", "rope_theta", "max_position_embeddings"), FOREIGN
        ),
    ),
    "l2d.json": Kind(
        _write_release, "l2d.json", mutations.of_json_or_bytes, _read_release, {"lora_alpha": FOREIGN, "sigma": FOREIGN}
    ),
    "base.json": Kind(_write_moved_workdir, "run/base.json", mutations.of_json_or_bytes, _read_workdir),
    "GGUF": Kind(
        lambda folder: write_gguf(folder / "x.gguf") and None,
        "x.gguf",
        partial(mutations.of_gguf_header, names=GGUF_NAMES),
        _read_gguf,
        GGUF_DECLARED,
    ),
}
