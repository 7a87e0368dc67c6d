"""The class of a published folder, in PyTorch, computes what the path computes in JAX."""

import dataclasses
import itertools
import json
import shutil
import subprocess
import sys
from collections import OrderedDict
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.data.batch import Batch
from l2d_jax.decoding.generation import generate_tokens
from l2d_jax.decoding.requests import Prompt, Request
from l2d_jax.errors import InputError
from l2d_jax.model.l2d import Model
from l2d_jax.parity import against_torch
from l2d_jax.training import objective
from l2d_jax.weights import mapping, publish
from tests.support import tiny
from tests.support.programs import same_bits

torch = pytest.importorskip("torch", reason="the published class is PyTorch's")
transformers = pytest.importorskip("transformers")

from l2d_jax.weights.pytorch.path_l2d import DiffusionPath  # noqa: E402
from l2d_jax.weights.pytorch.reading_l2d import twin  # noqa: E402
from tests.support.torch_models import FAMILIES, random_model  # noqa: E402

pytestmark = pytest.mark.torch

PATHS = {
    "released": {"classes": 2},
    "anchored": {"start": "anchored"},
    "reading": {"start": "anchored", "reader": "path", "sigma": 8.0},
    "dense": {"layers": "dense", "reader": "path", "classes": 3},
    "all": {"start": "anchored", "layers": "dense", "reader": "path", "classes": 2, "sigma": 8.0, "time_scale": 100.0},
}
CASES = [
    *((kind, name) for kind in ("llama-scaled", "qwen-tied") for name in ("released", "anchored", "reading", "dense")),
    *((kind, name) for kind in ("qwen3", "mistral", "smollm3", "gemma3") for name in ("released", "all")),
]
CODE = {file.name for file in publish.CODE.glob("*_l2d.py")}
QUICK = (("gemma3", "all"),)  # of the comparisons, which take half a minute


def write(folder: Path, kind: str = "llama", **changes):
    """A base and a published path that corrects it visibly; the model in JAX."""
    llm, path = tiny.llm(kind), tiny.path(kind, **changes)
    folder.mkdir(parents=True, exist_ok=True)
    base = folder / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(tiny.CONFIGS[kind]))
    tensors = {name: make() for name, make in mapping.tensors(llm, mapping.LLM_ROWS)}
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    publish.write_torch_folder(
        folder,
        path,
        tiny.architecture(kind),
        base=str(base),
        base_revision=None,
        base_config=tiny.CONFIGS[kind],
        tokenizer=None,
    )
    return Model.build(llm, path)


def load(folder: Path, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tiny products spend their time on waiting for a second one, ten times that of the work where others compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def pair(request, tmp_path_factory):
    kind, name = request.param
    folder = tmp_path_factory.mktemp("published")
    ours = write(folder, kind, **PATHS[name])
    return ours, load(folder)


def ids(*shape, seed=0):
    return np.random.default_rng(seed).integers(96, size=shape)


def normal(*shape, seed=1):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def compare(ours: Model, theirs, *, count=None):
    """What the program compares (the first few), on rows beyond the windows."""
    rows = ids(2, 24)
    with jax.default_matmul_precision("highest"):
        arrays = dict(itertools.islice(against_torch.our_arrays(ours, rows), count))
        return list(itertools.islice(against_torch.path_checks(arrays, theirs, rows), count))


@pytest.mark.parametrize(
    ("kind", "name"), [pytest.param(*case, marks=[pytest.mark.slow] * (case not in QUICK)) for case in CASES]
)
def test_all_that_is_compared_equals_ours(tmp_path, kind, name):
    """Logits, trajectories with guidance and answers, as `verify --against torch` compares them; a path that says
    something else than its base."""
    found = compare(write(tmp_path, kind, **PATHS[name]), load(tmp_path))
    assert [(check.name, check.difference()) for check in found if not check.difference() < 1e-4] == []
    assert len(found) == 20
    plain, refined = found[0].ours, found[3].ours
    assert np.abs(plain - refined).max() > 0.1


def test_a_temperature_that_falls(tmp_path, monkeypatch):
    """Down to the arg max: it is ahead of t by as much as the solver asks."""
    monkeypatch.setattr(against_torch, "MEAN", against_torch.MEAN | {"anneal": True})
    found = compare(write(tmp_path, classes=2, sigma=8.0), load(tmp_path), count=15)
    assert [(check.name, check.difference()) for check in found if not check.difference() < 1e-4] == []


def in_turn(noise):
    """A function that gives the noise of one token after another."""
    numbers = iter(range(noise.shape[1]))
    return lambda shape: torch.tensor(noise[:, [next(numbers)]]).expand(shape)


def generate(model, prompts, noise, mask=None, **options):
    mask = np.ones_like(prompts) if mask is None else mask
    options = {"max_new_tokens": noise.shape[1], "do_sample": False, "eos_token_id": None, **options}
    with torch.no_grad():
        found = model.generate(
            torch.tensor(prompts), attention_mask=torch.tensor(mask), noise=in_turn(noise), **options
        )
    return found[:, prompts.shape[1] :].numpy()


def test_a_budget_of_one_is_the_language_model(pair, tmp_path):
    _, theirs = pair
    base = transformers.AutoModelForCausalLM.from_pretrained(theirs.config.base_model_name_or_path)
    tokens = torch.tensor(ids(2, 9))
    with torch.no_grad():
        assert torch.equal(theirs(tokens, budget=1).logits, base(tokens).logits)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(theirs.generate(tokens, budget=1, **options), base.generate(tokens, **options))


def test_padding_and_batch_mates_do_not_change_an_answer(pair):
    _, theirs = pair
    long, short, noise = ids(1, 9), ids(1, 5, seed=3), normal(2, 8, 16)
    options = {"budget": 5, "solver": "rk4"}
    alone = [generate(theirs, long, noise[:1], **options), generate(theirs, short, noise[1:], **options)]
    together = np.concatenate([long, np.pad(short, ((0, 0), (4, 0)))])
    mask = np.array([[1] * 9, [0] * 4 + [1] * 5])
    assert generate(theirs, together, noise, mask, **options).tolist() == np.concatenate(alone).tolist()


def test_loss_and_gradients_equal_ours(pair):
    ours, theirs = pair
    tokens, classes = ids(3, 11), np.array([0, 1, 1])
    weights = np.arange(10) >= np.array([[4], [7], [2]])
    batch = Batch(
        *(jnp.asarray(array, jnp.int32) for array in (tokens[:, :-1],)),
        queries=None,
        targets=jnp.asarray(tokens[:, 1:], jnp.int32),
        weights=jnp.asarray(weights, jnp.float32),
        classes=jnp.asarray(classes, jnp.int32) if ours.path.classes is not None else jnp.zeros(3, jnp.int32),
    )
    key = jax.random.key(5)
    corruption = objective.sample_corruption(key, batch, ours.path)
    loss, gradient = jax.value_and_grad(lambda path: objective.diffusion_loss(path, ours.llm, batch, key)[0])(ours.path)
    labels = np.concatenate([tokens[:, :1], np.where(weights, tokens[:, 1:], -100)], axis=1)
    theirs.zero_grad()
    given = {"noise": torch.tensor(np.array(corruption.noise)), "t": torch.tensor(np.array(corruption.t))}
    if corruption.labels is not None:
        given["class_labels"] = torch.tensor(np.array(corruption.labels))
    found = theirs(torch.tensor(tokens), labels=torch.tensor(labels), **given).loss
    found.backward()
    assert abs(found.item() - float(loss)) < 1e-5
    expected = {name: make() for name, make in mapping.tensors(gradient, publish.TORCH_ROWS)}
    gradients = {name: weight.grad for name, weight in theirs.named_parameters() if weight.requires_grad}
    assert gradients.keys() == expected.keys()
    for name, value in gradients.items():
        difference = np.abs(value.numpy() - expected[name]).max()
        assert difference < 1e-5 * max(1.0, np.abs(expected[name]).max()), (name, difference)
    assert all(parameter.grad is None for parameter in theirs.lm.parameters())


def unscaled(model, layer, call):
    """The angles of plain rotary embedding with a base of 10,000."""
    angles = torch.arange(call["hidden_states"].shape[1])[:, None] * 1e4 ** (-torch.arange(0, 1, 2 / layer.head_dim))
    angles = torch.cat([angles, angles], dim=-1)[None]
    return call | {"position_embeddings": (angles.cos(), angles.sin())}


def unlimited(model, layer, call):
    """Every earlier token is seen."""
    length = call["hidden_states"].shape[1]
    return call | {"attention_mask": torch.ones(1, 1, length, length, dtype=torch.bool).tril()}


def called(change):
    """The path's attention is called with something else."""

    def leave_out(model):
        for layer in path_layers(model):
            hook = partial(lambda module, _, call: ((), change(model, module, call)))
            twin = layer.self_attn
            twin._forward_pre_hooks, twin._forward_pre_hooks_with_kwargs = OrderedDict(), OrderedDict()
            twin.register_forward_pre_hook(hook, with_kwargs=True)

    return leave_out


def path_layers(model):
    """The layers of the language model with the path's matrices, which share with it all that is not replaced."""
    return model._layers[0]


def without(*names):
    """A module of each of the path's layers, such as a norm, does nothing."""

    def leave_out(model):
        for layer in path_layers(model):
            *places, name = names
            for place in places:
                layer = getattr(layer, place)
            layer._modules[name] = torch.nn.Identity()

    return leave_out


def set_in(place, **values):
    """A part of each of the path's layers has other values."""

    def leave_out(model):
        for layer in path_layers(model):
            vars(getattr(layer, place)).update(values)

    return leave_out


def no_query_bias(model):
    for layer in path_layers(model):
        projection = layer.self_attn.q_proj
        linear = twin(projection.owner[0].q_proj)
        linear._parameters = {**linear._parameters, "bias": None}
        projection.owner = (twin(projection.owner[0], q_proj=linear),)


def unscaled_inputs(model):
    model.path.register_forward_pre_hook(
        lambda _, given: (*given[:3], dataclasses.replace(given[3], inputs=given[3].inputs / 32**0.5), given[4])
    )


def silu(model):
    for layer in path_layers(model):
        layer.mlp._modules["act_fn"] = torch.nn.SiLU()


LEFT_OUT = {  # of what a family's layers do, in the path in PyTorch
    "scaling": ("llama-scaled", called(unscaled)),
    "bias": ("qwen-tied", no_query_bias),
    "head norm": ("qwen3", without("self_attn", "q_norm")),
    "yarn": ("qwen3-yarn", called(unscaled)),
    "late window": ("qwen-late-windows", called(unlimited)),
    "window": ("mistral", called(unlimited)),
    "no rope": ("smollm3", set_in("self_attn", use_rope=1)),
    "sliding layers": ("gemma3", called(unlimited)),
    "two bases": ("gemma3", called(unscaled)),
    "norm behind attention": ("gemma3", without("post_attention_layernorm")),
    "norm behind the MLP": ("gemma3", without("post_feedforward_layernorm")),
    "GeGLU": ("gemma3", silu),
    "query scale": ("gemma3", set_in("self_attn", scaling=16**-0.5)),
    "embedding scale": ("gemma3", unscaled_inputs),
}


@pytest.mark.parametrize("feature", LEFT_OUT)
def test_what_is_left_out_is_noticed(tmp_path, feature):
    """By the logits at every t; those of the language model are as they were."""
    kind, leave_out = LEFT_OUT[feature]
    ours = write(tmp_path, kind, start="anchored")
    assert all(check.passed() for check in compare(ours, load(tmp_path), count=5))
    theirs = load(tmp_path)
    leave_out(theirs)
    assert [check.passed() for check in compare(ours, theirs, count=5)] == [True, *[False] * 4]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_decodes_as_a_whole_pass_says(family, attention):
    """Beyond sliding windows, with padding: the cache changes nothing, nor do the positions that are refined beside."""
    model = random_model(family, attention=attention, start="anchored")
    prompts, noise = ids(2, 9), normal(2, 8, 16)
    mask = np.array([[1] * 9, [0] * 3 + [1] * 6])
    options = {"budget": 5, "velocity": "expectation", "velocity_temperature": 1.0}
    found = generate(model, prompts, noise, mask, **options)
    assert found.tolist() == generate(model, prompts, noise, mask, use_cache=False, **options).tolist()
    tokens, mask = np.concatenate([prompts, found], axis=1), np.pad(mask, ((0, 0), (0, 8)), constant_values=1)
    x_0 = np.zeros((2, 17, 16), np.float32)
    x_0[:, 8:-1] = noise
    positions = np.maximum(mask.cumsum(axis=1) - 1, 0)
    arguments = map(torch.tensor, (tokens, mask, positions))
    with torch.no_grad():
        logits = model(*arguments, noise=torch.tensor(x_0), **options).logits[:, 8:-1]
    assert logits.argmax(-1).tolist() == found.tolist()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("reader", ["lm", "path"])
def test_a_new_anchored_path_is_the_language_model_of_every_family(family, reader):
    model = random_model(family, start="anchored", reader=reader)
    options, decoder = model.options, model.lm.get_decoder()
    torch.manual_seed(1)
    new = DiffusionPath(options, decoder.layers, decoder.config.hidden_size)
    model.path.load_state_dict(new.state_dict())
    tokens, mask = torch.tensor(ids(2, 11)), torch.tensor([[1] * 11, [0] * 3 + [1] * 8])
    with torch.no_grad():
        plain = model(tokens, mask, budget=1).logits
        for budget in (3, 7):
            assert (model(tokens, mask, budget=budget).logits - plain)[mask == 1].abs().max() < 1e-4


@pytest.fixture
def anchored(tmp_path):
    ours = write(tmp_path, start="anchored", classes=2)
    return tmp_path, ours, load(tmp_path)


def test_transformers_ways_of_generating_work(anchored):
    """Sampling, streaming, several answers, beams and a static cache; a generator for each row."""
    _, _, model = anchored
    prompts, options = torch.tensor(ids(2, 6)), {"max_new_tokens": 6, "budget": 3, "eos_token_id": None}

    class Kept(list):
        put = list.append

        def end(self):
            pass

    def generators(*seeds):
        return [torch.Generator().manual_seed(seed) for seed in seeds]

    streamer = Kept()
    chosen = {"velocity_temperature": 1.0, "anneal": True, "class_labels": torch.tensor([0, 1]), "guidance": 2.0}
    both = model.generate(prompts, generator=generators(1, 2), do_sample=False, **options, **chosen)
    chosen["class_labels"] = chosen["class_labels"][1:]
    alone = model.generate(
        prompts[1:], generator=generators(2), do_sample=False, streamer=streamer, **options, **chosen
    )
    assert both[1].tolist() == alone[0].tolist() == torch.cat([part.reshape(-1) for part in streamer]).tolist()
    sampled = model.generate(prompts, do_sample=True, num_return_sequences=3, temperature=1.5, **options)
    assert len({tuple(row) for row in sampled.tolist()}) == 6
    assert model.generate(prompts, num_beams=3, do_sample=False, **options).shape == (2, 12)
    fixed = {"noise": torch.tensor(normal(2, 1, 16)), "do_sample": False, **options}
    still = model.generate(prompts, cache_implementation="static", **fixed)
    assert still.tolist() == model.generate(prompts, **fixed).tolist()


def test_half_precision_follows(anchored):
    folder, _, model = anchored
    half = load(folder, dtype=torch.bfloat16)
    tokens, noise = torch.tensor(ids(2, 8)), torch.tensor(normal(2, 8, 16))
    options = {"budget": 3, "velocity": "expectation", "velocity_temperature": 1.0, "noise": noise}
    with torch.no_grad():
        expected, found = (each(tokens, **options).logits.softmax(-1) for each in (model, half))
    assert half.path.vocabulary.weight.dtype == torch.float32
    assert (expected - found).abs().max() < 0.05


BAD = [
    ({"budget": 4}, "try 3 or 5"),
    ({"budget": 0}, "try 1 or 3"),
    ({"solver": "adaptive"}, "choose from euler"),
    ({"velocity": "mean"}, "sample"),
    ({"class_labels": torch.tensor([3, 0])}, "0 to 1"),
    ({"noise": torch.zeros(2, 1, 3)}, "shape"),
    ({"guidance": 2.0}, "class_labels"),
    ({"anneal": True}, "velocity_temperature"),
    ({"velocity": "expectation"}, "velocity_temperature"),
    ({"velocity_temperature": -1.0}, "0 or more"),
    ({"bugdet": 3}, "unknown option 'bugdet'"),
    ({"seed": -1}, "whole number"),
    ({"seed": 0.5}, "whole number"),
    ({"seed": 1, "generator": torch.Generator()}, "not both"),
    ({"sequence_ids": torch.arange(3)}, "one for each of 2 rows"),
    ({"answer_start": torch.arange(3)}, "one number, or 2"),
    ({"inputs_embeds": torch.zeros(2, 4, 32)}, "either"),
    ({"generator": [torch.Generator()]}, "2 rows"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_bad_options_are_named(anchored, options, message):
    with pytest.raises(ValueError, match=message):
        anchored[2](torch.tensor(ids(2, 4)), **options)


def test_bad_folders_are_named(anchored, tmp_path):
    folder, ours, _ = anchored
    raw = json.loads((folder / "config.json").read_text())
    for change, message in (
        ({"path": raw["path"] | {"sharpness": 2}}, "sharpness"),
        ({"path": raw["path"] | {"reader": "nobody"}}, "reader"),
        ({"path": raw["path"] | {"classes": 0}}, "classes"),
        ({"path": raw["path"] | {"lora_rank": 5}}, "does not fit"),
        ({"text_config": {"model_type": "gpt2"}}, "gpt2"),
    ):
        (folder / "config.json").write_text(json.dumps(raw | change))
        with pytest.raises(ValueError, match=message):
            load(folder)
        with pytest.raises(InputError):
            publish.TorchFolder.open(folder)
    (folder / "config.json").write_text(json.dumps(tiny.CONFIGS["llama"]))
    with pytest.raises(InputError, match="model_type"):
        publish.TorchFolder.open(folder)
    options = {"base": "a/b", "base_revision": None, "base_config": tiny.CONFIGS["qwen"], "tokenizer": None}
    with pytest.raises(InputError, match="another architecture"):
        publish.write_torch_folder(tmp_path, ours.path, tiny.architecture("llama"), **options)


@pytest.mark.parametrize("name", PATHS)
def test_a_path_trained_further_comes_back(tmp_path, mesh, name):
    ours = write(tmp_path / "first", "qwen", **PATHS[name])
    found = publish.TorchFolder.open(tmp_path / "first")
    assert (found.config, found.base) == (ours.path.config, str(tmp_path / "first" / "base"))
    assert same_bits(found.load(mesh), ours.path)
    theirs = load(tmp_path / "first").train()
    assert not theirs.lm.training
    options = {"budget": 3, "velocity": "expectation", "velocity_temperature": 1.0, "noise": torch.ones(4, 12, 16)}
    optimizer = torch.optim.AdamW([weight for weight in theirs.parameters() if weight.requires_grad], lr=1e-2)
    tokens, classes = torch.tensor(ids(4, 12)), None if ours.path.classes is None else torch.zeros(4, dtype=torch.long)
    with torch.no_grad():
        before, losses = theirs(tokens, **options).logits, []
    for _ in range(8):
        torch.manual_seed(0)
        loss = theirs(tokens, labels=tokens, class_labels=classes).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    theirs.save_pretrained(tmp_path / "second")
    again = load(tmp_path / "second")
    assert all(
        torch.equal(a, b) for a, b in zip(again.state_dict().values(), theirs.state_dict().values(), strict=True)
    )
    with torch.no_grad():
        after = theirs(tokens, **options).logits
        assert torch.equal(after, again(tokens, **options).logits)  # though the vocabulary's vectors had been kept
    assert not torch.allclose(before, after, atol=1e-3)
    files = {file.name for file in (tmp_path / "second").iterdir()}
    assert files - {"config.json", "generation_config.json", "model.safetensors"} == CODE
    back = publish.TorchFolder.open(tmp_path / "second").load(mesh)
    expected = {name: make() for name, make in mapping.tensors(back, publish.TORCH_ROWS)}
    assert all(np.array_equal(theirs.state_dict()[name].numpy(), value) for name, value in expected.items())
    assert not same_bits(back, ours.path)


ALONE = """
import sys
class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("jax", "jaxlib", "flax", "l2d_jax", "numpyro", "diffrax", "jaxtyping"):
            raise ImportError(f"{name} is not to be imported")
sys.meta_path.insert(0, Refusing())
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
print(type(model).__module__.split(".")[0], model.num_parameters(only_trainable=True))
answer = model.generate(torch.tensor([[5, 6, 7]]), budget=15, solver="midpoint", answer_start=3,
                        max_new_tokens=5, do_sample=False, eos_token_id=None)
print(answer.tolist())
model.save_pretrained(sys.argv[2])
again = AutoModelForCausalLM.from_pretrained(sys.argv[2], trust_remote_code=True)
print(again.generate(torch.tensor([[5, 6, 7]]), answer_start=3, max_new_tokens=5, do_sample=False).tolist())
"""


@pytest.mark.slow
def test_a_folder_works_without_this_project(tmp_path):
    """In a process that cannot import JAX or this project; the base is found from beside the folder.

    The answer is the same as here, from the same seed, and after the folder is saved again in another place.
    """
    ours = write(tmp_path / "published", start="anchored")
    shutil.move(tmp_path / "published", tmp_path / "moved")
    file = tmp_path / "moved" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": "base"}))
    command = [sys.executable, "-P", "-c", ALONE, str(tmp_path / "moved"), str(tmp_path / "saved" / "elsewhere")]
    environment = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "PATH": "", "HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    count = sum(leaf.size for leaf in jax.tree.leaves(ours.path))
    [expected] = generate_tokens(ours, Request([Prompt(0, [5, 6, 7])], DecodeConfig(max_new_tokens=5)))
    answer = str([[5, 6, 7, *expected]])
    assert done.stdout.split("\n")[:3] == [f"transformers_modules {count}", answer, answer]
    assert {file.name for file in (tmp_path / "saved" / "elsewhere").glob("*.py")} == CODE
