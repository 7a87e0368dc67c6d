import json

import pytest
from safetensors.numpy import load_file, save_file

from l2d_jax import convert
from l2d_jax.data import tokenizer
from l2d_jax.loading import load
from l2d_jax.weights import model_folder
from l2d_jax.weights.safetensors_file import SafetensorsFolder, write_safetensors
from tests.support.programs import FIXTURES, base_tensors, call, same_bits, write_base, write_release


def import_release(folder, out, *, l2d=None):
    arguments = ["--l2d", l2d or folder / "l2d.safetensors", "--hyperparameters", folder / "l2d.json", "--out", out]
    return call(convert.main, "import", "--base", folder / "base", *arguments)


def files(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("llama-scaled", {"classes": 2}), ("qwen", {}), ("qwen-tied", {"layers": "dense"})],
)
def test_every_tensor_keeps_its_bits(tmp_path, kind, changes):
    state = write_release(tmp_path / "release", kind, **changes)
    outcome = import_release(tmp_path / "release", tmp_path / "out")
    assert (outcome.status, outcome.err) == (0, "")
    assert files(tmp_path / "out") == ["config.json", "model.safetensors", "path.json", "path.safetensors"]
    own, path = (load_file(tmp_path / "out" / f"{name}.safetensors") for name in ("model", "path"))
    assert own.keys() == load_file(tmp_path / "release" / "base" / "model.safetensors").keys()
    assert all(same_bits(tensor, state[name]) for name, tensor in (own | path).items())
    aliased = {name for name in state if "wrapped_layer" in name or name == "lm_head.weight"}
    assert own.keys() | path.keys() == (state.keys() - aliased) | (own.keys() & aliased)


@pytest.mark.parametrize("name", ["llama_lora", "llama_guid", "qwen_lora", "qwen_full"])
def test_the_releases_own_files(tmp_path, name):
    if not FIXTURES.is_dir():
        pytest.skip(f"no recordings of the release at {FIXTURES}")
    assert import_release(FIXTURES / name, tmp_path / "out").status == 0
    state = SafetensorsFolder.open_file(FIXTURES / name / "l2d.safetensors")
    for file in ("model.safetensors", "path.safetensors"):
        found = SafetensorsFolder.open_file(tmp_path / "out" / file)
        assert found.records
        assert all(same_bits(found.read(tensor), state.read(tensor)) for tensor in found.records)
    assert load(tmp_path / "out", dtype="float32").model.path is not None


def test_what_lies_beside_the_base_is_taken_over(tmp_path):
    base = write_base(tmp_path / "base")
    (base / "generation_config.json").write_text('{"eos_token_id": 258}')
    for name in ("modeling.py", "pytorch_model.bin", "path.json", "README.md"):
        (base / name).write_text("{}")
    (base / "model.safetensors").unlink()
    write_safetensors(base, base_tensors().items(), max_shard_bytes=30_000)
    assert call(convert.main, "import", "--base", base, "--out", tmp_path / "out").status == 0
    found = files(tmp_path / "out")
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= set(found)
    assert [name for name in found if "safetensors" in name] == ["model.safetensors"]  # in one file again
    assert not {"modeling.py", "pytorch_model.bin", "path.json", "README.md"} & set(found)
    loaded = load(tmp_path / "out", dtype="float32")
    assert loaded.model.path is None
    assert loaded.tokenizer.get_vocab() == tokenizer.byte_tokenizer().get_vocab()
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors.keys() == base_tensors().keys()
    assert all(same_bits(tensors[name], tensor) for name, tensor in base_tensors().items())


def test_an_imported_folder_can_be_imported_again(tmp_path):
    write_release(tmp_path / "release", "llama")
    import_release(tmp_path / "release", tmp_path / "first")
    assert call(convert.main, "import", "--base", tmp_path / "first", "--out", tmp_path / "second").status == 0
    assert files(tmp_path / "second") == ["config.json", "model.safetensors"]


def test_pytorch_checkpoints(tmp_path):
    torch = pytest.importorskip("torch")
    state = write_release(tmp_path / "release", "qwen-tied")
    tensors = {name: torch.from_numpy(array.copy()) for name, array in state.items()}
    torch.save({"model_state_dict": tensors}, tmp_path / "training.pt")
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    import_release(tmp_path / "release", tmp_path / "reference")
    for file in ("training.pt", "pytorch_model.bin"):
        out = tmp_path / f"out_{file}"
        assert import_release(tmp_path / "release", out, l2d=tmp_path / file).status == 0
        for name in files(tmp_path / "reference"):
            assert (out / name).read_bytes() == (tmp_path / "reference" / name).read_bytes(), name


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--l2d", "--l2d and --hyperparameters go together"),
        ("--hyperparameters", "--l2d and --hyperparameters go together"),
        ("--bse", "unrecognized arguments"),
    ],
)
def test_bad_options_are_one_line(tmp_path, option, message):
    arguments = ["--base", tmp_path, "--out", tmp_path / "out", option, "x"]
    assert message in call(convert.main, "import", *arguments).error
    assert "invalid choice: 'improt'" in call(convert.main, "improt").error


def break_base(folder):
    (folder / "base" / "config.json").write_text("{}")


def break_checkpoint(folder):
    file = folder / "l2d.safetensors"
    file.write_bytes(file.read_bytes()[:-4])


def break_alias(folder):
    state = load_file(folder / "l2d.safetensors")
    state["model.layers.0.mlp.flow_up_proj.wrapped_layer.weight"][0, 0] += 1
    save_file(state, folder / "l2d.safetensors")


def break_hyperparameters(folder):
    raw = json.loads((folder / "l2d.json").read_text())
    raw["l2d_kwargs"]["noise_schedule"] = "cosine"
    (folder / "l2d.json").write_text(json.dumps(raw))


def change_rank(folder):
    raw = json.loads((folder / "l2d.json").read_text())
    raw["l2d_kwargs"]["flow_lora_rank"] = 5
    (folder / "l2d.json").write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (break_base, "unsupported architecture none: supported are LlamaForCausalLM, Qwen2ForCausalLM"),
        (break_checkpoint, "truncated?"),
        (break_alias, "tensor model.layers.0.mlp.flow_up_proj.wrapped_layer.weight differs from"),
        (break_hyperparameters, "hyper-parameter noise_schedule = 'cosine' is not supported"),
        (change_rank, "flow_down_proj.A has shape [48, 4], expected [48, 5]"),
        (lambda folder: (folder / "l2d.json").unlink(), "l2d.json"),
        (lambda folder: (folder / "l2d.safetensors").unlink(), "no checkpoint"),
        (lambda folder: (folder / "base" / "config.json").unlink(), "config.json"),
    ],
)
def test_a_failure_is_one_line_and_leaves_nothing(tmp_path, spoil, message):
    write_release(tmp_path / "release", "llama")
    spoil(tmp_path / "release")
    assert message in import_release(tmp_path / "release", tmp_path / "out").error
    assert files(tmp_path) == ["release"]


def test_a_failure_while_writing_leaves_nothing(tmp_path, monkeypatch):
    write_release(tmp_path / "release", "llama")

    def fail(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(model_folder, "write_path", fail)
    assert import_release(tmp_path / "release", tmp_path / "out").status == 130
    assert files(tmp_path) == ["release"]


def test_an_existing_folder_is_refused(tmp_path):
    write_release(tmp_path / "release", "llama")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("kept")
    assert "output goes into a new or empty folder" in import_release(tmp_path / "release", tmp_path / "out").error
    assert files(tmp_path / "out") == ["precious"]
    assert "cannot create a folder" in import_release(tmp_path / "release", "/proc/none/out").error
    assert "cannot create" in import_release(tmp_path / "release", tmp_path / "release" / "l2d.json" / "out").error
