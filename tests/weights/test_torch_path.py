"""The class of a published folder, in PyTorch, computes what the path computes in JAX."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.data.batch import Batch
from l2d_jax.decoding import integrate, refine
from l2d_jax.decoding.solver import SOLVERS
from l2d_jax.errors import InputError
from l2d_jax.model.context import Context, read_context
from l2d_jax.model.l2d import Model
from l2d_jax.training import objective
from l2d_jax.weights import mapping, publish
from tests.support import tiny
from tests.support.programs import same_bits

torch = pytest.importorskip("torch", reason="the published class is PyTorch's")
transformers = pytest.importorskip("transformers")

PATHS = {
    "released": {"classes": 2},
    "anchored": {"start": "anchored"},
    "reading": {"start": "anchored", "reader": "path", "sigma": 8.0},
    "dense": {"layers": "dense", "reader": "path", "classes": 3},
}
CASES = [(kind, name) for kind in ("llama", "qwen-tied") for name in PATHS]
SOLVED = [("euler", 5), ("midpoint", 7), ("heun", 7), ("heun3", 7), ("rk4", 9)]


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


def read(model: Model, tokens) -> Context:
    """The context of every token, as the path reads it."""
    tokens = jnp.asarray(tokens, jnp.int32)
    weights, classes = jnp.ones(tokens.shape, jnp.float32), jnp.zeros(len(tokens), jnp.int32)
    return read_context(model.path.reader(model.llm), Batch(tokens, None, tokens, weights, classes))


def labels_of(model: Model):
    return None if model.path.classes is None else np.array([1, 0])


def settings_of(model: Model, **options) -> refine.Refinement:
    return refine.Refinement.prepare(model, DecodeConfig(**options))


def test_logits_at_fixed_noise_and_time_equal_ours(pair):
    ours, theirs = pair
    tokens, x, t = ids(2, 9), 10 * normal(2, 9, 16), np.random.default_rng(2).uniform(size=(2, 9)).astype(np.float32)
    context, labels = read(ours, tokens), labels_of(ours)
    if labels is not None:
        context = context._replace(labels=jnp.asarray(labels, jnp.int32)[:, None])
    expected = ours.llm.logits(context.hidden + ours.path(ours.llm, jnp.asarray(x), jnp.asarray(t), context))
    with torch.no_grad():
        reading, _ = theirs._read(input_ids=torch.tensor(tokens))
        classes = None if labels is None else torch.tensor(labels)[:, None]
        found = theirs._logits(theirs._corrected(torch.tensor(x), torch.tensor(t), classes, reading))
    assert np.abs(found.numpy() - np.asarray(expected)).max() < 1e-4
    assert np.abs(np.asarray(expected - ours.llm.logits(context.hidden))).max() > 0.1


@pytest.mark.parametrize(("solver", "budget"), SOLVED)
@pytest.mark.parametrize("anneal", [False, True])
def test_whole_trajectories_equal_ours(tmp_path, solver, budget, anneal):
    """With guidance, and the mean over tokens at a temperature that may fall."""
    ours = write(tmp_path, classes=2, sigma=8.0)
    theirs = load(tmp_path)
    tokens, noise = ids(2, 6), normal(2, 6, 16)
    chosen = {"velocity": "expectation", "velocity_temperature": 1.5, "anneal": anneal, "guidance": 1.7}
    settings = settings_of(ours, solver=solver, budget=budget, **chosen)
    context = read(ours, tokens)._replace(labels=jnp.full((2, 6), 1, jnp.int32))
    keys = jax.random.split(jax.random.key(0), (2, 6))
    target = refine.make_target(ours, context, settings=settings, keys=keys)
    steps = int(settings.steps)
    expected = integrate.fixed_states(target, 8.0 * jnp.asarray(noise), solver=SOLVERS[solver], steps=steps)
    states = []
    original = theirs.__class__.forward.__globals__["trajectory"]

    def record(*arguments):
        for state in original(*arguments):
            states.append(state)
            yield state

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setitem(theirs.__class__.forward.__globals__, "trajectory", record)
        options = {"budget": budget, "solver": solver, "class_labels": torch.tensor([1, 1]), **chosen}
        found = theirs(torch.tensor(tokens), noise=torch.tensor(noise), **options).logits
    assert np.abs(torch.stack(states).numpy() - np.asarray(expected)).max() < 1e-4
    hidden = refine.refine(ours, context, jnp.asarray(noise), settings=settings, keys=keys)
    assert np.abs(found.numpy() - np.asarray(ours.llm.logits(hidden))).max() < 1e-4


def greedy(model: Model, prompts, noise, *, count: int, labels=None, **options):
    """Our greedy answers, without a cache; the noise of each token is that of the position before it."""
    settings = settings_of(model, **options)
    length = prompts.shape[1]
    keys = jax.random.split(jax.random.key(0), (len(prompts), length + count))

    @jax.jit
    def logits(tokens, noise):
        context = read(model, tokens)
        if labels is not None:
            context = context._replace(labels=jnp.broadcast_to(jnp.asarray(labels)[:, None], tokens.shape))
        return model.llm.logits(refine.refine(model, context, noise, settings=settings, keys=keys))

    tokens = np.pad(prompts, ((0, 0), (0, count))).astype(np.int32)
    at = np.zeros((*tokens.shape, noise.shape[-1]), np.float32)
    at[:, length - 1 : -1] = noise
    for end in range(length, length + count):
        tokens[:, end] = np.argmax(np.asarray(logits(tokens, at))[:, end - 1], axis=-1)
    return tokens[:, length:]


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


def test_greedy_answers_equal_ours_token_by_token(pair):
    ours, theirs = pair
    prompts, noise, labels = ids(2, 7), normal(2, 12, 16), labels_of(ours)
    options = {"budget": 7, "solver": "midpoint", "guidance": 1.3}
    expected = greedy(ours, prompts, noise, count=12, labels=labels, **options)
    given = {} if labels is None else {"class_labels": torch.tensor(labels)}
    found = generate(theirs, prompts, noise, **options, **given)
    assert found.tolist() == expected.tolist()
    assert found.tolist() != generate(theirs, prompts, noise, budget=1).tolist()


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


FAMILIES = {
    "llama": {"rope_scaling": {**tiny._SCALING, "rope_theta": 10000.0}},
    "mistral": {"sliding_window": 5},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "smollm3": {"no_rope_layers": [1, 0, 1], "pad_token_id": 0},
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 12,
    },
}


def random_model(family: str, *, attention: str = "sdpa", **path):
    """A new path beside random weights, all of which are random, norms and biases too."""
    sizes = {**tiny.CONFIGS["llama"], "num_hidden_layers": 3, "max_position_embeddings": 128, "model_type": family}
    sizes |= {"bos_token_id": 1, "eos_token_id": None} | FAMILIES[family]
    sizes = {name: value for name, value in sizes.items() if name not in ("architectures", "rope_theta")}
    text = transformers.AutoConfig.for_model(**sizes)
    module = code()
    torch.manual_seed(0)
    lm = transformers.AutoModelForCausalLM.from_config(text, attn_implementation=attention)
    config = module.L2DConfig(path=vars(tiny.path_config(**path)), text_config=text)
    model = module.L2DForCausalLM(config, lm)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn(weight.shape) * tiny.scale(name)[1] + ("norm" in name and family[0] != "g"))
    return model.eval()


def code():
    """The class, imported as l2d_jax has it."""
    from l2d_jax.weights.pytorch import modeling_l2d

    return modeling_l2d


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
    new = code().DiffusionPath(options, decoder.layers, decoder.config.hidden_size)
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
    assert files == {"config.json", "model.safetensors", "configuration_l2d.py", "modeling_l2d.py", "path_l2d.py"}
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
noise = torch.arange(16.0).reshape(1, 1, 16) / 8 - 1
answer = model.generate(torch.tensor([[5, 6, 7]]), budget=15, solver="midpoint", noise=noise, max_new_tokens=5,
                        do_sample=False, eos_token_id=None)
print(answer.tolist())
"""


@pytest.mark.slow
def test_a_folder_works_without_this_project(tmp_path):
    """In a process that cannot import JAX or this project; the base is found from beside the folder."""
    ours = write(tmp_path / "published", start="anchored")
    shutil.move(tmp_path / "published", tmp_path / "moved")
    file = tmp_path / "moved" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": "base"}))
    command = [sys.executable, "-P", "-c", ALONE, str(tmp_path / "moved")]
    environment = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "PATH": "", "HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    count = sum(leaf.size for leaf in jax.tree.leaves(ours.path))
    noise = np.broadcast_to(np.arange(16, dtype=np.float32) / 8 - 1, (1, 5, 16))
    expected = greedy(ours, np.array([[5, 6, 7]]), noise, count=5, budget=15, solver="midpoint")
    assert done.stdout.split("\n")[:2] == [f"transformers_modules {count}", str([[5, 6, 7, *expected[0].tolist()]])]
