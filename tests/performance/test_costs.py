import re

import jax
import pytest

from l2d_jax import train
from l2d_jax.config.config_file import read_config
from l2d_jax.config.schema import PathConfig
from l2d_jax.distributed.memory import bytes_per_device, parameters
from l2d_jax.model.architecture import Architecture
from l2d_jax.model.diffusion_path import DiffusionPath
from l2d_jax.model.llm import LLM
from l2d_jax.performance import costs
from l2d_jax.weights import base_model, model_folder
from tests.support.programs import ROOT, call, config, open_base, options

# Trainable parameters of the release: LoRA of rank 32, full copies, LoRA with 3 classes.
TRAINABLE = {
    "llama1b": (73_344_256, 992_945_408, 73_345_280),
    "qwen1p5b": (103_324_928, 1_357_825_280, 103_325_952),
    "r1_qwen1p5b": (103_324_928, 1_357_825_280, 103_325_952),  # the path has neither a head nor embeddings of its own
    "llama8b": (281_036_032, 6_918_522_112, 281_037_056),
    "qwen7b": (233_008_384, 6_582_236_416, 233_009_408),
    "smollm2_135m": (37_620_864, 128_859_264, 37_621_888),
}
# Llama 3.2 1B, part by part; the layers' LoRA is the rest.
PARTS = {"modulation": 51_580_928, "merge": 592_128, "translation": 592_128, "vocabulary": 524_544, "time": 131_584}


@pytest.mark.parametrize("name", TRAINABLE)
def test_trainable_parameters_are_those_of_the_release(name):
    file = ROOT / "configs" / f"{name}.py"
    variants = [(str(file), {}), (f"{file}:dense", {}), (str(file), {"path.classes": 3})]
    found = []
    for reference, overrides in variants:
        options = read_config(reference, overrides)
        architecture = Architecture.from_hf(options.model.architecture)
        found.append(parameters(DiffusionPath.declare(options.path, architecture)))
    assert tuple(found) == TRAINABLE[name]


def test_the_frozen_parameters_of_r1_are_those_counted_by_hand():
    options = read_config(str(ROOT / "configs" / "r1_qwen1p5b.py"))
    attention = 1536 * (1536 + 2 * 256) + (1536 + 2 * 256) + 1536 * 1536  # q, k and v with biases, o
    layer = attention + 3 * 1536 * 8960 + 2 * 1536
    llm = LLM.declare(Architecture.from_hf(options.model.architecture), dtype="bfloat16")
    assert parameters(llm) == 2 * 151936 * 1536 + 28 * layer + 1536 == 1_777_088_000


def test_the_parts_are_those_of_the_release():
    options = read_config(str(ROOT / "configs" / "llama1b.py"))
    path = DiffusionPath.declare(options.path, Architecture.from_hf(options.model.architecture))
    parts = {name: getattr(path, name) for name in ("merge", "translation", "vocabulary", "time")}
    parts["modulation"] = path.layers.modulation
    found = {name: parameters(part) for name, part in parts.items()}
    assert found == PARTS
    assert parameters(path) - sum(found.values()) == 19_922_944


def test_declared_and_real_trees_have_the_same_size(mesh):
    declared = DiffusionPath.declare(config().path, Architecture.from_hf(config().model.architecture))
    llm = open_base(config().model, mesh).llm
    path = model_folder.new_path(config().path, llm, mesh, seed=0)
    assert parameters(path) == costs.parameters(declared) == sum(x.size for x in jax.tree.leaves(path))
    assert bytes_per_device(declared, mesh) == sum(x.nbytes for x in jax.tree.leaves(path))


@pytest.mark.parametrize("layers", ["lora", "dense"])
def test_flops_are_twice_the_weights_of_every_product(layers):
    a = Architecture.from_hf(config().model.architecture)
    attention = 2 * a.hidden_size * a.num_attention_heads * a.head_dim  # q and o
    products = a.num_hidden_layers * (attention + 3 * a.hidden_size * a.intermediate_size)
    keys = a.num_hidden_layers * 2 * a.hidden_size * a.num_key_value_heads * a.head_dim  # k and v
    path = PathConfig(layers=layers)
    trained = parameters(DiffusionPath.declare(path, a))
    frozen = products if layers == "lora" else 0
    assert costs.flops_per_token(a, path) == {
        "frozen pass": 2 * (products + keys),
        "path forward": 2 * (frozen + trained),
        "path backward": 2 * frozen + 4 * trained,
        "output head": 4 * a.vocab_size * a.hidden_size,
    }
    more = costs.flops_per_token(a, path, draws_per_context=3)
    one = costs.flops_per_token(a, path)
    assert more == {name: count if name == "frozen pass" else 3 * count for name, count in one.items()}


@pytest.mark.parametrize("layers", ["lora", "dense"])
def test_a_path_that_reads_the_context_has_a_backward_pass_over_it(layers):
    a = Architecture.from_hf(config().model.architecture)
    own, other = (costs.flops_per_token(a, PathConfig(layers=layers, reader=reader)) for reader in ("path", "lm"))
    names = ("q", "k", "v", "o", "gate", "up", "down")
    path = DiffusionPath.declare(PathConfig(layers=layers, reader="path"), a)
    changes = parameters([getattr(path.layers, name) for name in names])
    frozen = parameters([getattr(LLM.declare(a, dtype="float32").layers, name) for name in names])
    kept = frozen if layers == "lora" else 0
    assert own.pop("forward") == 2 * (kept + changes)
    assert own.pop("backward") == 2 * kept + 4 * changes
    assert other.pop("frozen pass") == 2 * frozen
    assert own == other  # no evaluation has keys and values of its own


def test_flops_of_a_step_and_of_a_decoded_token():
    a = Architecture.from_hf(config().model.architecture)
    options = config(train__batch_size=2, data__max_length=256, data__answer_length=128)
    parts = costs.flops_per_token(a, options.path)
    assert costs.flops_per_step(options, a) == {
        name: 2 * count * (256 if name == "frozen pass" else 128) for name, count in parts.items()
    }

    def decoded(**changes):
        return costs.flops_per_decoded_token(config(**changes), a)

    head = a.vocab_size * a.hidden_size
    path = DiffusionPath.declare(options.path, a)
    read = parameters((path.translation, *(getattr(path.layers, n) for n in ("q", "o", "gate", "up", "down"))))
    shared = parameters([getattr(LLM.declare(a, dtype="float32").layers, n) for n in ("q", "o", "gate", "up", "down")])
    assert decoded(decode__budget=1) == parts["frozen pass"] + 2 * head
    assert decoded(decode__budget=3) == parts["frozen pass"] + 3 * 2 * (head + shared + read)
    assert decoded(decode__budget=3, decode__draws=2) == parts["frozen pass"] + 6 * 2 * (head + shared + read)


def test_dry_run_reads_no_weights(monkeypatch):
    monkeypatch.setattr(base_model, "find_base", None)
    monkeypatch.setattr(base_model.BaseFiles, "load", None)
    outcome = call(train.main, "--config", ROOT / "configs" / "llama1b.py", "--dry_run")
    assert outcome.status == 0
    assert outcome.err == ""
    rows = dict(re.split(r"  +", line, maxsplit=1) for line in outcome.out.splitlines())
    assert rows["trainable parameters"].strip() == "73,344,256"
    assert rows["frozen parameters"].strip() == "1,235,814,400"
    assert rows["memory per device: path (float32)"].strip() == f"{4 * 73_344_256 / 2**30:.2f} GiB"
    assert rows["memory per device: its gradient and Adam moments"].strip() == f"{12 * 73_344_256 / 2**30:.2f} GiB"
    assert rows["memory per device: frozen weights (bfloat16)"].strip() == f"{2 * 1_235_814_400 / 2**30:.2f} GiB"


def test_dry_run_leaves_no_trace(tmp_path):
    assert call(train.main, *options(), "--dry_run", "--workdir", tmp_path / "w").status == 0
    assert not (tmp_path / "w").exists()
