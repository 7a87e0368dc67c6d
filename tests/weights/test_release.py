import json
import os
from functools import partial

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from l2d_jax.config.schema import PathConfig
from l2d_jax.errors import InputError
from l2d_jax.files import package_table
from l2d_jax.model.architecture import Architecture
from l2d_jax.weights import mapping, release
from tests.support import tiny
from tests.support.mappings import Tensors
from tests.support.programs import FIXTURES, STATE_DICTS, same_bits, write_release

KINDS = [("llama", {}), ("llama-tied", {"classes": 2}), ("qwen", {}), ("qwen-tied", {"layers": "dense"})]


def release_shapes(architecture, config):
    """The names and shapes of the state dict that an export writes."""
    source = Tensors({name: np.zeros(shape, np.float32) for name, shape in mapping.llm_shapes(architecture).items()})
    trained = {name: partial(np.zeros, shape) for name, shape in mapping.path_shapes(config, architecture).items()}
    state = release.state_dict(source, trained, architecture)
    return {name: make().shape for name, make in state.items()}


def check(folder, kind, **changes):
    source = release.open_checkpoint(folder / "l2d.safetensors")
    return release.check_checkpoint(source, tiny.architecture(kind), tiny.path_config(**changes))


@pytest.mark.parametrize(("kind", "changes"), KINDS)
def test_a_state_dict_is_the_model_the_path_and_aliases(tmp_path, kind, changes):
    state = write_release(tmp_path, kind, **changes)
    own, trained = check(tmp_path, kind, **changes)
    same = release.aliases(own, trained)
    assert sorted([*own, *trained, *same]) == sorted(state)
    assert set(own) == set(load_file(tmp_path / "base" / "model.safetensors"))


@pytest.mark.parametrize("name", ["llama_lora", "llama_guid", "qwen_lora", "qwen_full"])
def test_the_releases_own_state_dicts_are_sound(name):
    """Names, shapes and aliases as PyTorch wrote them, and as the release lists them."""
    folder = FIXTURES / name
    if not folder.is_dir():
        pytest.skip(f"no recordings of the release at {FIXTURES}")
    raw = json.loads((folder / "l2d.json").read_text())
    architecture = Architecture.from_hf(json.loads((folder / "base" / "config.json").read_text()))
    source = release.open_checkpoint(folder / "l2d.safetensors")
    own, trained = release.check_checkpoint(source, architecture, release.parse_hyperparameters(raw))
    shapes = next(value for key, value in raw.items() if "trainable" in key)
    assert {name: list(source.records[name].shape) for name in trained} == shapes
    assert set(own) == set(load_file(folder / "base" / "model.safetensors")) - {"lm_head.weight"} | (
        set() if architecture.tied else {"lm_head.weight"}
    )


@pytest.mark.parametrize("variant", STATE_DICTS)
def test_every_state_dict_of_the_release_is_ours(variant):
    """Names and shapes, aliases included, and all hyper-parameters, as the release's own classes list them."""
    theirs = STATE_DICTS[variant]
    config = release.parse_hyperparameters(theirs)
    ours = release_shapes(Architecture.from_hf(theirs["base"]), config)
    assert ours == {name: tuple(shape) for name, shape in theirs["tensors"].items()}
    options = theirs["l2d_kwargs"] | {"nstep_guidance_parameter": 1.0}  # our own exports leave guidance to the user
    assert release.options(config) == options


def test_an_old_list_of_hyper_parameters_is_read():
    """Exports had no more than what describes the path."""
    config = tiny.path_config(classes=3)
    raw = release.options(config)
    newer = {*package_table(release.ARGUMENTS)["others"], "velocity_schedule"}
    old = {name: value for name, value in raw.items() if name not in newer}
    assert len(old) == len(raw) - 13
    assert release.parse_hyperparameters(old) == config


def test_an_alias_that_differs_is_damage(tmp_path):
    state = write_release(tmp_path, "qwen-tied")
    for alias in (
        "lm_head.weight",
        "model.layers.1.self_attn.flow_q_proj.wrapped_layer.weight",
        "model.layers.1.self_attn.flow_q_proj.wrapped_layer.bias",
        "model.layers.0.mlp.flow_down_proj.wrapped_layer.weight",
    ):
        changed = state[alias].copy()
        changed.flat[0] += 1e-6
        save_file(state | {alias: changed}, tmp_path / "l2d.safetensors")
        with pytest.raises(InputError, match=f"tensor {alias} differs from"):
            check(tmp_path, "qwen-tied")


def test_tensors_that_do_not_fit_are_named(tmp_path):
    state = write_release(tmp_path, "llama")
    del state["model.layers.0.mlp.flow_up_proj.A"]
    state["model.layers.0.mlp.flow_up_proj.C"] = np.ones(2, np.float32)
    state["model.norm.weight"] = np.ones(2, np.float32)
    save_file(state, tmp_path / "l2d.safetensors")
    with pytest.raises(InputError) as caught:
        check(tmp_path, "llama")
    for fault in ("missing: model.layers.0.mlp.flow_up_proj.A", "flow_up_proj.C", "model.norm.weight has shape [2]"):
        assert fault in str(caught.value)


@pytest.mark.parametrize("config", [PathConfig(), tiny.path_config(classes=3), PathConfig(layers="dense", sigma=8.0)])
def test_hyper_parameters_are_read(config):
    raw = release.options(config)
    assert release.parse_hyperparameters(raw) == config
    assert release.parse_hyperparameters({"family": "llama", "l2d_kwargs": raw}) == config


@pytest.mark.parametrize("alpha", [None, -1])
def test_an_alpha_that_is_not_given_is_twice_the_rank(alpha):
    raw = release.options(tiny.path_config()) | {"flow_lora_alpha": alpha}
    assert release.parse_hyperparameters(raw).lora_alpha == 8.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise_schedule": "cosine"}, "noise_schedule = 'cosine' is not supported, only 'identity'"),
        ({"full_dit_modulation": False}, "full_dit_modulation = False is not supported, only True"),
        ({"flow_representation_num_layers": 2}, "flow_representation_num_layers = 2 is not supported"),
        ({"flow_representation_dim": "16"}, "hyper-parameters.width must be of type int, got '16'"),
        ({"noise_rescaling": None}, "hyper-parameters.sigma must be of type float"),
        ({"flow_representation_dim": 0}, "width must be in [1, 65536], got 0"),
    ],
)
def test_hyper_parameters_that_are_unknown_are_named(changes, message):
    with pytest.raises(InputError) as caught:
        release.parse_hyperparameters(release.options(PathConfig()) | changes)
    assert message in str(caught.value)


def test_hyper_parameters_that_are_missing_are_named():
    raw = release.options(PathConfig())
    del raw["noise_rescaling"]
    with pytest.raises(InputError, match="hyper-parameter noise_rescaling is missing"):
        release.parse_hyperparameters(raw)
    with pytest.raises(InputError, match="l2d_kwargs must be"):
        release.parse_hyperparameters({"l2d_kwargs": 3})


@pytest.mark.parametrize("suffix", [".pt", ".bin"])
@pytest.mark.parametrize("bare", [True, False])
def test_pytorch_files_hold_the_same_bits(tmp_path, suffix, bare):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    arrays = {
        "full": rng.normal(size=(3, 4)).astype(np.float32),
        "half": rng.normal(size=(5,)).astype(ml_dtypes.bfloat16),
        "ids": np.arange(3),
    }
    state = {name: torch.from_numpy(array) for name, array in arrays.items() if name != "half"}
    state["half"] = torch.from_numpy(arrays["half"].view(np.int16)).view(torch.bfloat16)
    state["transposed"] = state["full"].T
    file = tmp_path / f"checkpoint{suffix}"
    torch.save(state if bare else {"model_state_dict": state, "step": 3}, file)
    source = release.open_checkpoint(file)
    assert source.records.keys() == {*arrays, "transposed"}
    wanted = arrays | {"transposed": arrays["full"].T}
    for name, array in wanted.items():
        assert (source.records[name].shape, source.records[name].dtype) == (array.shape, array.dtype)
        assert same_bits(source.read(name), array)
    assert same_bits(source.read("full", (slice(1, 2), slice(0, 3))), arrays["full"][1:2, :3])


class Malicious:
    """Runs a command where a pickle is believed."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def test_a_malicious_pickle_is_refused_and_not_run(tmp_path):
    torch = pytest.importorskip("torch")
    state = {"weight": torch.ones(2), "payload": Malicious(f"touch {tmp_path}/executed")}
    torch.save(state, tmp_path / "evil.bin")
    with pytest.raises(InputError, match="is not a file of plain tensors") as caught:
        release.open_checkpoint(tmp_path / "evil.bin")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("content", [[1, 2], {"a": 3}, {"model_state_dict": {"a": "b"}}])
def test_what_is_not_a_state_dict(tmp_path, content):
    torch = pytest.importorskip("torch")
    torch.save(content, tmp_path / "odd.pt")
    with pytest.raises(InputError, match="is not a state dict"):
        release.open_checkpoint(tmp_path / "odd.pt")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(InputError, match="no checkpoint"):
        release.open_checkpoint(tmp_path / "none.pt")
    pytest.importorskip("torch")
    (tmp_path / "text.pt").write_text("hello")
    with pytest.raises(InputError, match="is not a file of plain tensors"):
        release.open_checkpoint(tmp_path / "text.pt")


def test_without_torch_safetensors_still_work(tmp_path, monkeypatch):
    state = write_release(tmp_path, "llama")
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    assert release.open_checkpoint(tmp_path / "l2d.safetensors").records.keys() == set(state)
    (tmp_path / "l2d.pt").write_bytes(b"")
    with pytest.raises(InputError, match=r"needs torch: pip install '\.\[torch\]'"):
        release.open_checkpoint(tmp_path / "l2d.pt")
