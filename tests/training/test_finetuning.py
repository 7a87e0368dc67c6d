"""The loss of the baselines against its definition, and whole steps against torch, transformers and PEFT."""

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from l2d_jax.config.schema import OptimConfig, TrainConfig
from l2d_jax.distributed import sharding
from l2d_jax.model import context, lm_head
from l2d_jax.model.llm import LLM
from l2d_jax.model.lm_head import negative_log_likelihood
from l2d_jax.training import objective
from l2d_jax.training.methods import method_of
from l2d_jax.training.objective import LossOptions, finetuning_loss
from l2d_jax.training.optimizer import optimizer
from l2d_jax.training.step import REMAT, init_state, make_step, micro_batches
from l2d_jax.weights import export, mapping
from l2d_jax.weights.base_model import cast_llm
from l2d_jax.weights.peft import ROWS
from tests.support import tiny

KEY = jax.random.key(0)


def close(ours, theirs, *, atol=1e-6, rtol=1e-4):
    jax.tree.map(partial(np.testing.assert_allclose, atol=atol, rtol=rtol), ours, theirs)


def by_definition(llm, batch, reduction="example"):
    hidden, _ = llm(batch.tokens, context.token_positions(batch), segments=batch.segments)
    logits = jnp.take_along_axis(llm.logits(hidden), batch.queries[..., None], axis=1)
    losses = negative_log_likelihood(logits.reshape(-1, logits.shape[-1]), batch.targets.reshape(-1))
    return jnp.sum(losses.reshape(batch.targets.shape) * objective.loss_weights(batch.weights, reduction))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "chunk"), [("llama-tied", 2), ("qwen", 1024)])
def test_the_loss_and_its_gradient_in_every_weight(kind, chunk):
    llm, batch = tiny.llm(kind), tiny.batch(examples=3)
    own = partial(
        finetuning_loss,
        losses=lm_head.target_losses_with_trained_head,
        options=LossOptions(chunk=chunk, remat=REMAT["full"]),
    )
    value, gradient = jax.jit(jax.value_and_grad(own))(llm, batch)
    wanted, plain = jax.jit(jax.value_and_grad(by_definition))(llm, batch)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    close(gradient, plain)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(gradient))


@pytest.mark.slow
def test_packed_rows_and_rows_without_gaps_have_the_same_losses():
    """Two examples in one row; and the loss at every token, of which all but the answers weigh nothing."""
    llm, batch = tiny.llm(), tiny.batch(examples=2, length=10)
    wanted = finetuning_loss(llm, batch, options=LossOptions("token"))
    joined = jax.tree.map(lambda a: a.reshape(1, -1), batch)
    packed = joined._replace(
        queries=joined.queries + jnp.array([[0] * 4 + [10] * 4]),
        classes=jnp.zeros((1, 8), jnp.int32),
        segments=jnp.array([[1] * 10 + [2] * 10]),
    )
    np.testing.assert_allclose(finetuning_loss(llm, packed, options=LossOptions("token")), wanted, rtol=1e-5)
    rows = jnp.arange(2)[:, None]
    targets, everywhere = (jnp.zeros((2, 10), a.dtype).at[rows, batch.queries].set(a) for a in batch[2:4])
    whole = batch._replace(queries=None, targets=targets, weights=everywhere)
    np.testing.assert_allclose(finetuning_loss(llm, whole, options=LossOptions("token")), wanted, rtol=1e-5)


def test_rematerialisation_changes_no_gradient():
    llm, lora, batch = tiny.llm(), tiny.adapter(), tiny.batch()

    def gradient(name):
        def lose(lora):
            return finetuning_loss(
                dataclasses.replace(llm, adapter=lora), batch, options=LossOptions(remat=REMAT[name])
            )

        return jax.jit(jax.grad(lose))(lora)

    plain = gradient("none")
    for name in REMAT.keys() - {"none"}:
        close(gradient(name), plain)


@pytest.mark.slow
def test_an_int8_base_is_frozen_and_its_adapter_learns(mesh):
    """The gradient is that beside the restored weights."""
    small, batch = cast_llm(tiny.llm(dtype=jnp.bfloat16), dtype="int8", mesh=mesh), tiny.batch()
    restored = dataclasses.replace(
        small,
        layers=jax.tree.map(
            lambda w: w.restore(jnp.bfloat16) if hasattr(w, "restore") else w,
            small.layers,
            is_leaf=lambda w: hasattr(w, "restore"),
        ),
    )

    def lose(lora, llm):
        return finetuning_loss(dataclasses.replace(llm, adapter=lora), batch)

    gradients = [jax.jit(jax.grad(lose))(tiny.adapter(), llm) for llm in (small, restored)]
    close(*gradients, atol=1e-3, rtol=2e-2)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(gradients[0]))


def test_master_weights_are_multiplied_in_the_type_of_the_products():
    """In float32, and rounded: the loss and its gradient are those of bfloat16 weights, in float32."""
    rounded = jax.tree.map(lambda a: a.astype(jnp.bfloat16), tiny.llm())
    master = jax.tree.map(lambda a: a.astype(jnp.float32), rounded)
    batch = tiny.batch()
    own = partial(finetuning_loss, losses=lm_head.target_losses_with_trained_head)
    wanted, plain = jax.jit(jax.value_and_grad(own))(rounded, batch)
    value, gradient = jax.jit(jax.value_and_grad(own))(dataclasses.replace(master, products="bfloat16"), batch)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {jnp.dtype(jnp.float32)}
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b.astype(jnp.float32), atol=0.02 * np.abs(a).max()),
        jax.tree.leaves(gradient),
        jax.tree.leaves(plain),
    )


# --- against torch ---

RATE, STEPS = 1e-3, 4
EPSILON = 1e-5  # of Adam: with 1e-8, a gradient of nothing but rounding (of a key's bias) is a step of full size


def write(folder, kind, llm):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny.CONFIGS[kind]))
    tensors = {name: make() for name, make in mapping.tensors(llm, mapping.LLM_ROWS)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def train(method, kind, mesh, trained, frozen):
    """Steps of ours: the losses, and the tree after them."""
    adam, config = (
        optimizer(OptimConfig(epsilon=EPSILON), RATE),
        TrainConfig(method=method, batch_size=4, accumulation=2),
    )
    declared = method_of(tiny.config(config)).declare(tiny.architecture(kind))
    state = init_state(adam, jax.device_put(jax.tree.map(np.array, trained), sharding.shardings(declared, mesh)), mesh)
    step = make_step(adam, config, state, mesh, objective=tiny.objective(config))
    losses = []
    for number in range(STEPS):
        batch = micro_batches(tiny.batch(examples=4, seed=number), 2, mesh)
        state, metrics = step(state, frozen, batch, jax.random.fold_in(KEY, number))
        losses.append(float(metrics["loss"]))
    assert step._cache_size() == 1
    return losses, state.trained


def train_torch(model):
    """The same steps of torch: mean over examples of token means, clipping, AdamW; norms and biases do not decay."""
    torch = pytest.importorskip("torch")
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    kept = [p for name, p in named if "norm" in name or "bias" in name]
    decayed = [p for name, p in named if not ("norm" in name or "bias" in name)]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": kept, "weight_decay": 0.0}]
    adam, losses = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=EPSILON), []
    for number in range(STEPS):
        batch = jax.tree.map(np.array, tiny.batch(examples=4, seed=number))
        tokens, queries, targets, weight = map(torch.from_numpy, batch[:4])
        logits = model(tokens.long()).logits
        chosen = torch.take_along_dim(logits, queries.long()[..., None], 1)
        values = torch.nn.functional.cross_entropy(chosen.transpose(1, 2), targets.long(), reduction="none")
        loss = ((values * weight).sum(1) / weight.sum(1)).mean()
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for _, p in named], 1.0)
        adam.step()
        losses.append(float(loss.detach()))
    return losses


def test_lora_steps_are_those_of_peft(tmp_path, mesh):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    llm, start = tiny.llm(), tiny.adapter()
    base, given = write(tmp_path / "base", "llama", llm), tmp_path / "adapter"
    given.mkdir()
    export.save_adapter(given, start, base=str(base))
    losses, trained = train("lora", "llama", mesh, start, llm)

    plain = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    model = peft.PeftModel.from_pretrained(plain, given, is_trainable=True)
    np.testing.assert_allclose(losses, train_torch(model), rtol=1e-5)
    assert losses[-1] != losses[0]
    theirs = {n.replace(".default", ""): p.detach().numpy() for n, p in model.named_parameters() if p.requires_grad}
    ours = {name: make() for name, make in mapping.tensors(trained, ROWS)}
    assert ours.keys() == theirs.keys()
    close(ours, theirs, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, llm, tiny.llm())  # the frozen bits stay


def test_full_steps_are_those_of_transformers(tmp_path, mesh):
    pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    kind = "qwen-tied"
    llm = tiny.llm(kind)
    model = AutoModelForCausalLM.from_pretrained(write(tmp_path / "base", kind, llm), dtype="float32")
    losses, trained = train("full", kind, mesh, llm, None)
    np.testing.assert_allclose(losses, train_torch(model), rtol=1e-5)
    theirs = {name: p.detach().numpy() for name, p in model.named_parameters()}
    ours = {name: make() for name, make in mapping.tensors(trained, mapping.LLM_ROWS)}
    assert ours.keys() == theirs.keys()
    close(ours, theirs, atol=1e-5)


@pytest.mark.slow
def test_norms_and_biases_do_not_decay():
    adam = optimizer(OptimConfig(weight_decay=1.0), 1.0)
    llm = tiny.llm("qwen")
    zero = jax.tree.map(jnp.zeros_like, llm)
    updates, _ = adam.update(zero, adam.init(llm), llm)
    still = {
        jax.tree_util.keystr(path) for path, leaf in jax.tree_util.tree_leaves_with_path(updates) if not np.any(leaf)
    }
    names = ["attention_norm", "mlp_norm", "q_bias", "k_bias", "v_bias"]
    assert still == {".norm", *(f".layers.{name}" for name in names)}
    assert isinstance(updates, LLM)
