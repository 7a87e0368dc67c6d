"""The class of a published folder, in PyTorch, computes what the path computes in JAX."""

import json
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
from l2d_jax.model.context import Context, read_context
from l2d_jax.model.l2d import Model
from l2d_jax.training import objective
from l2d_jax.weights import mapping, publish
from tests.support import tiny

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
