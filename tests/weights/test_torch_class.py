"""The class of a published folder behaves as one of transformers: the same answer whatever the way, and PEFT on top."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.decoding.generation import generate_tokens
from l2d_jax.decoding.requests import Prompt, Request
from l2d_jax.decoding.sampler import answer_keys, token_keys
from l2d_jax.errors import InputError
from l2d_jax.weights import publish
from tests.weights.test_torch_path import ids, load, one_thread, write

torch = pytest.importorskip("torch", reason="the published class is PyTorch's")
transformers = pytest.importorskip("transformers")

from l2d_jax.weights.pytorch.modeling_l2d import L2DForCausalLM  # noqa: E402
from l2d_jax.weights.pytorch.noise_l2d import TIME, Numbered  # noqa: E402
from tests.support.torch_models import random_model  # noqa: E402

pytestmark = pytest.mark.torch

OPTIONS = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
LABELS = torch.tensor([[-100, -100, 5, 6, 7, -100], [-100, 3, 4, 5, -100, -100]])


@pytest.fixture(scope="module")
def model():
    return random_model("llama")


def answer(model, prompt, **options):
    with torch.no_grad():
        return model.generate(prompt, **OPTIONS, **options)[:, prompt.shape[1] :].tolist()


def saved(model, prompt, tmp_path, **options):
    model.save_pretrained(tmp_path)
    return answer(L2DForCausalLM.from_pretrained(tmp_path), prompt, **options)


def padded(model, prompt, _, **options):
    """In a batch with a longer prompt."""
    both = torch.cat([torch.nn.functional.pad(prompt, (4, 0)), torch.tensor(ids(1, 13, seed=5))])
    mask = torch.ones_like(both)
    mask[0, :4] = 0
    return answer(model, both, attention_mask=mask, **options)[:1]


def from_embeddings(model, prompt, _, **options):
    embedded = model.get_input_embeddings()(prompt)
    return model.generate(inputs_embeds=embedded, **OPTIONS, **options).tolist()


def continued(model, prompt, _, **options):
    """Two tokens first, then the rest from the cache."""
    first = model.generate(prompt, **OPTIONS | {"max_new_tokens": 2}, return_dict_in_generate=True, **options)
    rest = OPTIONS | {"max_new_tokens": 6}
    found = model.generate(first.sequences, past_key_values=first.past_key_values, **rest, **options)
    return found[:, prompt.shape[1] :].tolist()


def in_one_pass(model, prompt, _, **options):
    """Of all positions of the answer at once."""
    tokens = torch.cat([prompt, torch.tensor(answer(model, prompt, **options))], dim=1)
    with torch.no_grad():
        return model(tokens, **options).logits[:, prompt.shape[1] - 1 : -1].argmax(-1).tolist()


WAYS = {
    "again": lambda model, prompt, _, **options: answer(model, prompt, **options),
    "saved": saved,
    "padded": padded,
    "static cache": lambda model, prompt, _, **options: answer(model, prompt, cache_implementation="static", **options),
    "without a cache": lambda model, prompt, _, **options: answer(model, prompt, use_cache=False, **options),
    "prompt lookup": lambda model, prompt, _, **options: answer(model, prompt, prompt_lookup_num_tokens=3, **options),
    "embeddings": from_embeddings,
    "continued": continued,
    "in one pass": in_one_pass,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("velocity", [{}, {"velocity_temperature": 2.0, "anneal": True}], ids=["likeliest", "sampled"])
def test_an_answer_is_the_same_in_every_way(model, tmp_path, way, velocity):
    prompt = torch.tensor([[5, 6, 7, 8, 9, 5, 6, 7, 8]])  # of which prompt lookup finds a continuation
    alone = answer(model, prompt, budget=5, **velocity)
    assert answer(model, prompt, budget=5, seed=1, **velocity) != alone
    assert answer(model, prompt, budget=5, sequence_ids=[1], **velocity) != alone
    assert WAYS[way](model, prompt, tmp_path, budget=5, **velocity) == alone


def test_rows_may_have_other_noise(model):
    """And rows of the same number have the same; beams and several answers to a prompt share its number."""
    rows = torch.tensor(ids(1, 6)).repeat(3, 1)
    first, second, third = answer(model, rows, budget=5, sequence_ids=torch.tensor([4, 9, 4]))
    assert first == third != second
    assert answer(model, rows[:1], budget=5, sequence_ids=torch.tensor([9])) == [second]
    beams = {"num_beams": 2, "num_return_sequences": 2, "budget": 3}
    assert len(answer(model, rows[:2], sequence_ids=torch.tensor([0, 1]), **beams)) == 4


def test_random_numbers_are_those_of_jax():
    """Up to rounding in float32: noise, and what samples a velocity's token; times are new."""
    keys = answer_keys(jnp.full(3, 2**31 + 5, jnp.uint32), jnp.arange(3), jnp.zeros(3, jnp.int32))
    noise, velocity, _ = token_keys(keys, jnp.int32([7]))
    found = Numbered.of(2**31 + 5, torch.arange(3), torch.full((3, 1), 7))
    expected = jax.vmap(lambda key: jax.random.normal(key, (1, 33), jnp.float32))(noise)
    assert np.abs(found.normal(33).numpy() - expected).max() < 2e-6
    t = np.float32(1 / 3)
    folded = jax.vmap(lambda key: jax.random.fold_in(key, t.view(np.uint32)))(velocity)
    expected = jax.vmap(lambda key: jax.random.gumbel(key, (1, 97), jnp.float32))(folded)
    assert np.abs(found.gumbel(97, torch.tensor(t)).numpy() - expected).max() < 2e-6
    many = Numbered.of(0, None, torch.arange(10_000)[None])
    for numbers, mean, deviation in ((many.normal(1), 0, 1), (many.uniform(TIME), 1 / 2, 12**-0.5)):
        assert abs(numbers.mean() - mean) < 0.03
        assert abs(numbers.std() - deviation) < 0.03


SOLVERS = {"midpoint": 7, "euler": 5, "heun": 7, "heun3": 7, "rk4": 9, "restart": 5}


@pytest.mark.parametrize(
    "solver", [name if name == "midpoint" else pytest.param(name, marks=pytest.mark.slow) for name in SOLVERS]
)
def test_answers_from_a_seed_are_ours(tmp_path, solver):
    """With sampled velocities, whose numbers depend on the last bit of t, and in a batch of prompts."""
    ours, prompts = write(tmp_path, start="anchored", sigma=8.0), ids(2, 6)
    theirs, sampled = load(tmp_path), {"solver": solver, "budget": SOLVERS[solver], "velocity_temperature": 1.5}
    answers = []
    for seed in (0, 3):
        numbered = [Prompt(number, row.tolist()) for number, row in enumerate(prompts)]
        config = DecodeConfig(max_new_tokens=8, anneal=True, **sampled)
        answers.append(generate_tokens(ours, Request(numbered, config, seed=seed)))
        found = {"seed": seed, "sequence_ids": torch.arange(2), "answer_start": 6, "anneal": True}
        assert answer(theirs, torch.tensor(prompts), **found, **sampled) == answers[-1]
    assert answers[0] != answers[1]


@pytest.mark.parametrize("keep", [1, 3])
def test_empty_slots_are_not_attended_to(model, keep):
    """Of a static cache, in a call without a mask."""
    tokens, cache = torch.tensor(ids(2, 9)), transformers.StaticCache(config=model.config.text_config, max_cache_len=40)
    with torch.no_grad():
        whole = model(tokens, budget=5).logits[:, -keep:]
        for given in ({}, {"past_key_values": cache}):
            found = model(tokens, budget=5, logits_to_keep=keep, **given).logits
            assert (found - whole).abs().max() < 1e-4


def test_padding_on_the_left_needs_no_position_ids(model):
    tokens = torch.tensor(ids(1, 6))
    row, mask = torch.nn.functional.pad(tokens, (5, 0)), torch.tensor([[0] * 5 + [1] * 6])
    with torch.no_grad():
        for budget in (1, 5):
            difference = model(row, mask, budget=budget).logits[:, 5:] - model(tokens, budget=budget).logits
            assert difference.abs().max() < 1e-4


def test_logits_come_with_the_loss(model):
    tokens = torch.tensor(ids(2, 6))
    found = model(tokens, labels=LABELS)
    assert found.logits.shape == (2, 6, 96)
    assert found.past_key_values is None
    shown = LABELS[:, 1:] != -100
    losses = torch.nn.functional.cross_entropy(found.logits[:, :-1][shown], LABELS[:, 1:][shown], reduction="none")
    assert abs(losses.mean() - found.loss) < 1e-6  # both rows have three labels
    assert model(tokens, labels=LABELS, num_items_in_batch=12).loss == losses.sum() / 12
    assert model(tokens, labels=LABELS, seed=1).loss != found.loss == model(tokens, labels=LABELS).loss
    shifted = torch.nn.functional.pad(LABELS[:, 1:], (0, 1), value=-100)
    assert model(tokens, shift_labels=shifted).loss == found.loss
    alone = model(tokens, labels=LABELS, return_logits=False)
    assert alone.logits is None
    assert abs(alone.loss - found.loss) < 1e-6
    loss, logits = model(tokens, labels=LABELS, return_dict=False)
    assert torch.equal(loss, found.loss)
    assert torch.equal(logits, found.logits)
    model.train()
    assert model(tokens, labels=LABELS).loss != model(tokens, labels=LABELS).loss
    assert model(tokens, labels=LABELS, seed=0).loss == found.loss
    model.eval()


def test_hidden_states_end_with_the_corrected_ones(model):
    tokens = torch.tensor(ids(2, 6))
    for budget in (1, 5, 1):  # whose decoders share their hooks
        found = model(tokens, budget=budget, output_hidden_states=True, output_attentions=False)
        assert len(found.hidden_states) == 4
        assert (model.get_output_embeddings()(found.hidden_states[-1]) - found.logits).abs().max() < 1e-5
    eager = random_model("llama", attention="eager")
    for budget in (5, 1, 5):
        assert len(eager(tokens, budget=budget, output_attentions=True).attentions) == 3


@pytest.mark.parametrize("reader", ["lm", "path"])
def test_an_adapter_of_peft_has_gradients(reader, tmp_path):
    """On the language model's matrices and on the path's; what it changes is saved, once it is merged."""
    peft = pytest.importorskip("peft")
    model, tokens = random_model("llama", reader=reader), torch.tensor(ids(2, 6))
    config = peft.LoraConfig(target_modules=r".*(k_proj|o_proj|vocabulary|modulation\.last)", r=2, lora_dropout=0.5)
    with torch.no_grad():
        before = model(tokens, budget=5).logits
    adapted = peft.get_peft_model(model, config)
    adapted.train()
    assert model.lm.get_decoder().layers[0].self_attn.o_proj.lora_dropout["default"].training
    adapted(input_ids=tokens, labels=tokens).loss.backward()
    trained = {name: weight for name, weight in adapted.named_parameters() if "lora_B" in name}
    assert len(trained) == 3 * 3 + 1
    for name, weight in trained.items():
        assert weight.grad.abs().max() > 0, name
        weight.data += 0.05
    adapted.eval()
    with torch.no_grad():
        after = adapted(input_ids=tokens, budget=5).logits
    assert (after - before).abs().max() > 1e-2
    with pytest.raises(ValueError, match="merge_and_unload"):
        model.save_pretrained(tmp_path)
    merged = adapted.merge_and_unload()
    merged.save_pretrained(tmp_path)
    again = L2DForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert (again(tokens, budget=5).logits - after).abs().max() < 1e-4


def test_a_changed_language_model_is_saved_too(tmp_path):
    """A folder holds the path alone as long as the language model is that of its base, in half precision too."""
    write(tmp_path / "first", start="anchored")
    model, tokens = load(tmp_path / "first"), torch.tensor(ids(1, 6))
    model.save_pretrained(tmp_path / "alone", max_shard_size="20KB", state_dict=model.half().state_dict())
    assert len(list((tmp_path / "alone").glob("model-*.safetensors"))) > 1
    alone = load(tmp_path / "alone")
    assert alone.path.vocabulary.weight.dtype == torch.float32
    model = load(tmp_path / "first")
    for change in (lambda lm: lm.resize_token_embeddings(101), lambda lm: lm.model.norm.weight.data.mul_(1.5)):
        change(model.lm)
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        model.save_pretrained(folder)
        again = load(folder)
        with pytest.raises(InputError, match="names no base"):
            publish.TorchFolder.open(folder)
        assert not any(weight.requires_grad for weight in again.lm.parameters())
        for name, weight in again.state_dict().items():
            assert torch.equal(weight, model.state_dict()[name]), name
        with torch.no_grad():
            difference = again(tokens, budget=5).logits - model(tokens, budget=5).logits
        assert difference.abs().max() < 1e-4  # where a weight lies in memory changes the order of sums


def test_a_resized_table_has_vectors_for_new_tokens(model):
    model = random_model("llama")
    table = model.resize_token_embeddings(103)
    assert table is model.get_input_embeddings()
    assert not table.weight.requires_grad
    with torch.no_grad():
        found = model(torch.tensor([[102, 100, 5]]), budget=5, velocity="expectation", velocity_temperature=1.0)
        assert found.logits.shape == (1, 3, 103)
        whole = model(inputs_embeds=table(torch.tensor([[102, 100, 5]])), budget=5).logits
    assert whole.shape == (1, 3, 103)


def test_layers_are_computed_again_if_asked(model):
    """With the same gradients, by either kind of checkpoint."""
    model, tokens = random_model("llama", reader="path", start="anchored").train(), torch.tensor(ids(2, 6))

    def gradients():
        model.zero_grad()
        model(tokens, labels=tokens, seed=0).loss.backward()
        return [weight.grad.clone() for weight in model.path.parameters()]

    expected = gradients()
    calls = []
    for reentrant in (True, False):
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        hook = model.path.layers[0].modulation.register_forward_pre_hook(lambda *_: calls.append(1))
        for one, other in zip(gradients(), expected, strict=True):
            assert (one - other).abs().max() <= 1e-5 * max(1.0, other.abs().max())
        hook.remove()
    assert len(calls) == 4
    with pytest.raises(ValueError, match="every_n_layers"):
        model.activation_checkpointing_enable(every_n_layers=2)


def test_hooks_of_accelerate_do_not_lead_around_the_path(model):
    hooks = pytest.importorskip("accelerate.hooks")
    tokens = torch.tensor(ids(1, 6))
    with torch.no_grad():
        expected = model(tokens, budget=5).logits
    lm = random_model("llama").lm
    hooks.add_hook_to_module(lm.model, hooks.ModelHook())
    for layer in lm.model.layers:
        for module in (layer, layer.self_attn, layer.mlp):
            hooks.add_hook_to_module(module, hooks.ModelHook())
    hooked = L2DForCausalLM(model.config, lm)
    hooked.path.load_state_dict(model.path.state_dict())
    with torch.no_grad():
        assert torch.equal(hooked.eval()(tokens, budget=5).logits, expected)
    lm.lm_head.to("meta")
    with pytest.raises(ValueError, match="one device"):
        L2DForCausalLM(model.config, lm)


def test_a_language_model_alone_is_no_path(tmp_path):
    write(tmp_path)
    with pytest.raises(ValueError, match="'llama', not a path"):
        L2DForCausalLM.from_pretrained(tmp_path / "base")


@pytest.mark.slow
def test_compiled_once_for_all_times(model):
    """As many graphs for nine evaluations as for three; a loss is one graph."""
    tokens, graphs = torch.tensor(ids(1, 7)), torch._dynamo.utils.counters["stats"]
    counts = []
    for budget in (3, 9):
        torch._dynamo.reset()
        graphs.clear()
        compiled = torch.compile(model, backend="eager")
        with torch.no_grad():
            options = {"budget": budget, "velocity_temperature": 1.0}
            assert torch.equal(compiled(tokens, **options).logits, model(tokens, **options).logits)
        counts.append(graphs["unique_graphs"])
    assert counts[0] == counts[1] < 8
    torch._dynamo.reset()
    whole = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(whole(tokens, labels=tokens).loss, model(tokens, labels=tokens).loss)
    torch._dynamo.reset()


__all__ = ["one_thread"]  # a fixture
