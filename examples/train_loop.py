"""A training loop of your own: a frozen language model, a diffusion path, the loss, and optax.

    python examples/train_loop.py --model HuggingFaceTB/SmolLM2-135M-Instruct --steps 100

Without `--model` the language model is tiny and random. The task is to repeat a row of random tokens. Replace `batch`
by your data, and the loss or the optimizer by your idea. `l2d train` adds checkpoints, sharding and validation.
"""

import argparse

import jax
import jax.numpy as jnp
import optax

from l2d_jax.config.schema import MeshConfig, ModelConfig, PathConfig
from l2d_jax.data.batch import Batch
from l2d_jax.distributed.runtime import start_jax
from l2d_jax.model.diffusion_path import DiffusionPath
from l2d_jax.model.llm import LLM
from l2d_jax.training.objective import diffusion_loss
from l2d_jax.weights.base_model import find_base
from l2d_jax.weights.model_folder import new_path

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
ROWS, LENGTH = 8, 16  # sequences of a batch, and tokens to repeat


def batch(key: jax.Array, vocabulary: int) -> Batch:
    """Rows that say something twice. The loss counts at the second time: each token predicts its successor."""
    once = jax.random.randint(key, (ROWS, LENGTH), 0, min(vocabulary, 32))
    text = jnp.concatenate([once, once], axis=1)
    is_answer = jnp.arange(2 * LENGTH - 1) >= LENGTH - 1
    weights = jnp.broadcast_to(is_answer.astype(jnp.float32), (ROWS, 2 * LENGTH - 1))
    return Batch(text[:, :-1], queries=None, targets=text[:, 1:], weights=weights, classes=jnp.zeros(ROWS, jnp.int32))


def main() -> None:
    """Load the model, and take optimizer steps on the path alone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder, a hub id or a GGUF file")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    mesh = start_jax(MeshConfig())
    base = find_base(ModelConfig(name=options.model or "random", architecture=None if options.model else TINY))
    llm = base.load(dtype="float32", mesh=mesh)
    path = new_path(PathConfig(start="anchored", reader="path", sigma=8.0), llm, mesh, seed=0)
    optimizer = optax.adamw(optax.linear_schedule(1e-4, 3e-3, 10), weight_decay=0.0)

    @jax.jit
    def step(
        path: DiffusionPath, moments: optax.OptState, llm: LLM, key: jax.Array
    ) -> tuple[DiffusionPath, optax.OptState, jax.Array]:
        data, noise = jax.random.split(key)
        rows = batch(data, llm.architecture.vocab_size)
        (loss, _), gradient = jax.value_and_grad(diffusion_loss, has_aux=True)(path, llm, rows, noise)
        updates, moments = optimizer.update(gradient, moments, path)
        return optax.apply_updates(path, updates), moments, loss

    moments, keys = optimizer.init(path), jax.random.split(jax.random.key(0), options.steps)
    for number, key in enumerate(keys, 1):
        path, moments, loss = step(path, moments, llm, key)
        print(f"step {number}/{options.steps}  loss {loss:.4f} nats")


if __name__ == "__main__":
    main()
