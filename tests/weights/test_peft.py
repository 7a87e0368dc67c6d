"""Adapters as PEFT writes them: whichever way they name their layers, the logits are PEFT's."""

import json
from functools import partial

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from l2d_jax import convert
from l2d_jax.errors import InputError
from l2d_jax.weights.peft import Adapter, adapter_shapes
from l2d_jax.weights.peft_config import PeftConfig, adapter_base
from tests.support import tiny
from tests.support.exports import logits, transformers_logits
from tests.support.peft_adapters import save_by_peft, write_adapter
from tests.support.programs import call, same_bits, write_release

LAYER = "model.layers.{}.{}"
WAYS = {  # the options of PEFT's LoraConfig
    "ends of names": {"target_modules": ["q_proj", "v_proj"]},
    "all-linear": {"target_modules": "all-linear"},
    "full names": {"target_modules": [LAYER.format(0, "self_attn.k_proj"), LAYER.format(1, "mlp.up_proj")]},
    "a regular expression": {"target_modules": r".*\.(?:0\.self_attn|1\.mlp)\.\w+_proj"},
    "excluded by the ends of names": {
        "target_modules": "all-linear",
        "exclude_modules": ["gate_proj", "0.mlp.up_proj"],
    },
    "excluded by an expression": {"target_modules": ["q_proj", "o_proj"], "exclude_modules": r".*\.1\..*q.*"},
    "one layer": {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": 1},
    "layers under a pattern": {"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": "layers"},
    "a full name whatever the layers": {
        "target_modules": [LAYER.format(0, "self_attn.q_proj"), "v_proj"],
        "layers_to_transform": [1],
    },
    "ranks and alphas": {
        "target_modules": ["q_proj", "v_proj", "up_proj"],
        "rank_pattern": {"q_proj": 5, r"layers\.1\..*": 2, "v_proj": 7},
        "alpha_pattern": {r"^model\.layers\.0\.self_attn\.q_proj": 3, "up_proj": 40},
    },
    "ranks by their roots": {
        "target_modules": ["q_proj", "o_proj"],
        "rank_pattern": {LAYER.format(1, "self_attn.o_proj"): 6},
        "use_rslora": True,
    },
    "starts that leave the base": {"target_modules": ["k_proj"], "r": 4, "init_lora_weights": "orthogonal"},
    "transposed, which a linear layer is not": {"target_modules": ["k_proj"], "fan_in_fan_out": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_logits_are_those_of_peft_and_the_adapter_comes_back(tmp_path, way):
    pytest.importorskip("peft")
    kind = "qwen" if "ranks" in way else "llama"
    write_release(tmp_path / "release", kind)
    base, given = tmp_path / "release" / "base", tmp_path / "adapter"
    theirs = save_by_peft(given, base, **WAYS[way])
    outcome = call(convert.main, "import", "--base", base, "--adapter", given, "--out", tmp_path / "model")
    assert (outcome.status, outcome.err) == (0, "")
    ours = logits(tmp_path / "model")[0]
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert np.abs(ours - logits(base)[0]).max() > 0.01
    again = call(convert.main, "export", "--model", tmp_path / "model", "--format", "peft", "--out", tmp_path / "out")
    assert again.status == 0, again
    names = [folder / "adapter_model.safetensors" for folder in (given, tmp_path / "out")]
    assert same_bits(*map(load_file, names))
    configs = [json.loads((folder / "adapter_config.json").read_text()) for folder in (given, tmp_path / "out")]
    assert configs[1] == configs[0] | {"base_model_name_or_path": str(base)}


def test_peft_reads_what_was_exported(tmp_path):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    write_release(tmp_path / "release", "llama")
    base = tmp_path / "release" / "base"
    theirs = save_by_peft(tmp_path / "adapter", base, **WAYS["ranks by their roots"])
    Adapter.open(tmp_path / "adapter", tiny.architecture("llama")).write(tmp_path / "release", base=str(base))
    plain = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    read = transformers_logits(peft.PeftModel.from_pretrained(plain, tmp_path / "release"))
    np.testing.assert_array_equal(read, theirs)


def test_adapters_lie_on_adapters_of_other_kinds(tmp_path):
    pytest.importorskip("peft")
    write_release(tmp_path / "release", "llama")
    base = tmp_path / "release" / "base"
    save_by_peft(tmp_path / "one", base, **WAYS["ranks and alphas"])
    call(convert.main, "import", "--base", base, "--adapter", tmp_path / "one", "--out", tmp_path / "first")
    call(convert.main, "export", "--model", tmp_path / "first", "--format", "hf", "--out", tmp_path / "merged")
    theirs = save_by_peft(tmp_path / "two", tmp_path / "merged", **WAYS["all-linear"])
    raw = json.loads((tmp_path / "two" / "adapter_config.json").read_text())
    raw["base_model_name_or_path"] = str(tmp_path / "first")
    (tmp_path / "two" / "adapter_config.json").write_text(json.dumps(raw))
    np.testing.assert_allclose(logits(tmp_path / "two")[0], theirs, atol=1e-4)


def test_layers_without_tensors_have_no_update(tmp_path):
    """As where a tool has trained the last layers, and names all: PEFT leaves B of the others at zero."""
    given = write_adapter(tmp_path / "adapter", "llama", modules=("q_proj", "v_proj"))
    file = given / "adapter_model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if ".layers.1." in name}, file)
    adapter = Adapter.open(given, tiny.architecture("llama"))
    assert adapter.layers == {LAYER.format(1, f"self_attn.{name}_proj") for name in "qv"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type = 'IA3' is not supported, only 'LORA'"),
        ({"bias": "all"}, "bias = 'all' is not supported, only 'none': merge it into its base by PEFT's"),
        ({"use_dora": True}, "'use_dora' = True is not supported: merge it"),
        ({"modules_to_save": ["lm_head"]}, "'modules_to_save' = ['lm_head'] is not supported"),
        ({"trainable_token_indices": [3]}, "'trainable_token_indices' = [3] is not supported"),
        ({"target_parameters": ["x"]}, "'target_parameters' = ['x'] is not supported"),
        ({"alora_invocation_tokens": [1]}, "'alora_invocation_tokens' = [1] is not supported"),
        ({"layer_replication": [[0, 2]]}, "'layer_replication' = [[0, 2]] is not supported"),
        ({"an_option_of_tomorrow": 1.5}, "'an_option_of_tomorrow' = 1.5 is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights = 'pissa_niter_4' trains on a changed base"),
        ({"init_lora_weights": "OLoRA"}, "init_lora_weights = 'OLoRA' trains on a changed base: save it by"),
        ({"r": 0}, "r must be greater than or equal to 1, got 0: give it as PEFT saves it"),
        ({"r": 10**9}, "r must be less than or equal to 65536, got 1000000000"),
        ({"r": "8"}, "r must be a valid integer, got '8'"),
        ({"lora_alpha": None}, "lora_alpha must be a valid number, got None"),
        ({"lora_alpha": float("nan")}, "lora_alpha must be less than or equal to 1000000, got nan"),
        ({"lora_alpha": float("inf")}, "lora_alpha must be less than or equal to 1000000"),
        ({"target_modules": None}, "must be a valid list, got None"),
        ({"target_modules": []}, "target_modules Value should have at least 1 item"),
        ({"target_modules": [["q_proj"]]}, "must be a valid string, got ['q_proj']"),
        ({"target_modules": "(q_proj"}, "'(q_proj' is no regular expression"),
        ({"target_modules": "(x*)*" * 30 + "y"}, "does not select"),
        ({"r": 4}, "model.layers.0.self_attn.q_proj.lora_A.weight has shape [3, 32], expected [4, 32]"),
        ({"rank_pattern": {"q_proj": 8}}, "q_proj.lora_A.weight has shape [3, 32], expected [8, 32]"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern.q_proj must be greater than or equal to 1, got 0"),
        ({"target_modules": ["q_proj"]}, "has an update of model.layers.0.self_attn.v_proj, which adapter_config.json"),
        (
            {"exclude_modules": ["v_proj"]},
            "has an update of model.layers.0.self_attn.v_proj, which adapter_config.json",
        ),
        ({"layers_to_transform": [1]}, "has an update of model.layers.0.self_attn.q_proj, which adapter_config.json"),
    ],
)
def test_what_would_be_another_model_is_refused(tmp_path, changes, message):
    given = write_adapter(tmp_path / "adapter", "qwen", **changes)
    with pytest.raises(InputError) as error:
        Adapter.open(given, tiny.architecture("qwen"))
    assert message in str(error.value)


def test_tensors_without_a_place_are_refused(tmp_path):
    given = write_adapter(tmp_path / "adapter", "llama")
    file, architecture = given / "adapter_model.safetensors", tiny.architecture("llama")
    tensors = load_file(file)
    [b, *_] = (name for name in tensors if "lora_B" in name)
    shapes = {"base_model.model.lm_head.lora_A.weight": (3, 32), "base_model.model.lm_head.lora_B.weight": (96, 3)}
    head = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    for changed, message in (
        ({name: tensor for name, tensor in tensors.items() if name != b}, f"missing: {b}"),
        (tensors | head, r"not part of this architecture: base_model\.model\.lm_head"),
        ({}, "has no tensors"),
    ):
        save_file(changed, file)
        with pytest.raises(InputError, match=message):
            Adapter.open(given, architecture)


def test_an_expression_that_takes_for_ever_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("l2d_jax.weights.peft_config.SECONDS", 0.2)
    given = write_adapter(tmp_path / "adapter", "llama", target_modules=r"(?:(.)|(..))+(?<=\1\1\2)")
    with pytest.raises(InputError, match="take too long"):
        Adapter.open(given, tiny.architecture("llama"))


def test_a_pattern_for_each_of_many_layers_is_soon_read(tmp_path):
    """As EVA writes them, for more layers than the library keeps patterns."""
    parts = [*(f"self_attn.{x}_proj" for x in "qkvo"), *(f"mlp.{x}_proj" for x in ("gate", "up", "down"))]
    ranks = {LAYER.format(i, part): 1 + (i + len(part)) % 9 for i in range(75) for part in parts}
    raw = {"r": 8, "lora_alpha": 16, "target_modules": list(ranks), "rank_pattern": ranks, "alpha_pattern": ranks}
    (tmp_path / "adapter_config.json").write_text(json.dumps(raw))
    config = PeftConfig.open(tmp_path)
    for layer in list(ranks)[::60]:
        assert config.ranks(layer) == [ranks[layer]]
        assert config.scale(layer, ranks[layer]) == 1
    assert len(config._compiled) == len(ranks)  # each was compiled once


def test_the_shapes_of_an_adapter_that_is_trained_here_are_those_that_peft_makes(tmp_path):
    pytest.importorskip("peft")
    write_release(tmp_path / "release", "llama")
    save_by_peft(tmp_path / "adapter", tmp_path / "release" / "base", **WAYS["ends of names"])
    adapter = Adapter.open(tmp_path / "adapter", tiny.architecture("llama"))
    found = {name: record.shape for name, record in adapter.source.records.items()}
    assert found == adapter_shapes(adapter.config, tiny.architecture("llama"))


def test_a_base_on_the_hub_is_of_the_revision_that_the_adapter_names(tmp_path):
    adapter = write_adapter(tmp_path / "adapter", "llama", base_model_name_or_path="org/name", revision="abc123")
    assert adapter_base(adapter) == "org/name@abc123"
    opened = Adapter.open(adapter, tiny.architecture("llama"))
    (tmp_path / "out").mkdir()
    opened.write(tmp_path / "out", base="org/name@abc123")
    raw = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (raw["base_model_name_or_path"], raw["revision"]) == ("org/name", "abc123")
    opened.write(tmp_path / "out", base=str(tmp_path))
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["revision"] is None
    file = adapter / "adapter_config.json"
    for value, message in ((5, "base_model_name_or_path must be a valid string, got 5"), ("", "")):
        file.write_text(json.dumps({"base_model_name_or_path": value}))
        if message:
            with pytest.raises(InputError, match=message):
                adapter_base(adapter)
        else:
            assert adapter_base(adapter) is None


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_adapter_that_is_not_finite_goes_nowhere(tmp_path, value):
    write_release(tmp_path / "release", "llama")
    base, given = tmp_path / "release" / "base", write_adapter(tmp_path / "adapter", "llama")
    file = given / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "lora_A" in name)
    tensors[name][1, 2] = value
    save_file(tensors, file)
    outcome = call(convert.main, "import", "--base", base, "--adapter", given, "--out", tmp_path / "model")
    assert f"tensor '{name}' has entries that are not finite" in outcome.error
    (given / "adapter_config.json").write_text(
        json.dumps(json.loads((given / "adapter_config.json").read_text()) | {"base_model_name_or_path": str(base)})
    )
    for format in ("hf", "peft"):
        outcome = call(convert.main, "export", "--model", given, "--format", format, "--out", tmp_path / "out")
        assert f"tensor '{name}' has entries that are not finite" in outcome.error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "release"]


def test_a_sum_that_overflows_goes_nowhere(tmp_path):
    write_release(tmp_path / "release", "llama")
    base, given = tmp_path / "release" / "base", write_adapter(tmp_path / "adapter", "llama", lora_alpha=1e6)
    weights = {name: tensor.astype(np.float16) for name, tensor in load_file(base / "model.safetensors").items()}
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    call(convert.main, "import", "--base", base, "--adapter", given, "--out", tmp_path / "model")
    outcome = call(convert.main, "export", "--model", tmp_path / "model", "--format", "hf", "--out", tmp_path / "out")
    assert "tensor 'model.layers.0.self_attn.q_proj.weight' has entries that are not finite" in outcome.error


def test_the_selection_is_that_of_peft(tmp_path):
    """Over all layers, for options drawn at random."""
    tuners = pytest.importorskip("peft.tuners.tuners_utils")
    from peft import LoraConfig
    from peft.utils.other import get_pattern_key

    parts = [*(f"self_attn.{x}_proj" for x in "qkvo"), *(f"mlp.{x}_proj" for x in ("gate", "up", "down"))]
    layers = [LAYER.format(i, part) for i in (0, 1, 3, 11) for part in parts]
    rng = np.random.default_rng(0)
    words = ["q_proj", "mlp.up_proj", "1.self_attn.q_proj", "proj", *layers[:20], ".*", "mlp", "layers.1", "up_proj"]
    expressions = [r".*q_proj", r".*\.1\d?\..*", r"model\.layers\.[0-5]\..*(?:up|down)_proj", "x", ""]
    pick = partial(rng.choice, replace=False)
    for _ in range(20):
        names = [str(name) for name in pick(words, rng.integers(1, 6))]
        targets = names if rng.random() < 0.6 else str(rng.choice(expressions[:4]))
        excluded = [None, [str(name) for name in pick(words, 2)], str(rng.choice(expressions))][rng.integers(3)]
        raw = {"r": 8, "lora_alpha": 16, "target_modules": targets, "exclude_modules": excluded}
        if isinstance(targets, list) and rng.random() < 0.5:
            raw["layers_to_transform"] = [1, 11] if rng.random() < 0.5 else 3
            raw["layers_pattern"] = [None, "layers", ["h", "layers"], "h", []][rng.integers(5)]
        raw["rank_pattern"] = {str(key): int(rng.integers(1, 9)) for key in pick(words[:24], 3)}
        (tmp_path / "adapter_config.json").write_text(json.dumps(raw))
        ours = PeftConfig.open(tmp_path)
        theirs = LoraConfig(**raw)
        for layer in layers:
            assert ours.selects(layer) == bool(tuners.check_target_module_exists(theirs, layer)), (raw, layer)
            key = get_pattern_key(theirs.rank_pattern.keys(), layer)
            assert ours.ranks(layer)[0] == theirs.rank_pattern.get(key, theirs.r), (raw, layer)
