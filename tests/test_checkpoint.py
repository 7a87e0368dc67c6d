import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from programs import same_bits

from l2d_jax.checkpoint import Checkpoints
from l2d_jax.diffusion_path import DiffusionPath
from l2d_jax.errors import InputError


@pytest.fixture
def tree():
    rng = np.random.default_rng(0)
    return {
        "weight": jnp.asarray(rng.normal(size=(4, 3)), jnp.float32),
        "half": jnp.asarray(rng.normal(size=5), jnp.bfloat16),
        "count": jnp.int32(7),
    }


def save(folder, step, **items):
    checkpoints = Checkpoints(folder, keep=2)
    checkpoints.save(step, items)
    checkpoints.close()


def restore(folder, step=None, **like):
    checkpoints = Checkpoints(folder)
    found = checkpoints.restore(checkpoints.latest() if step is None else step, like)
    checkpoints.close()
    return found


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def test_every_bit_comes_back(tmp_path, tree):
    save(tmp_path, 3, path=tree, optimizer=[tree, ()])
    found = restore(tmp_path, path=abstract(tree), optimizer=abstract([tree, ()]))
    assert same_bits(found["path"], tree)
    assert same_bits(found["optimizer"], [tree, ()])
    assert jax.tree.structure(found["optimizer"]) == jax.tree.structure([tree, ()])


def test_a_part_can_be_restored_alone(tmp_path, tree):
    save(tmp_path, 3, path=tree, optimizer=tree)
    assert restore(tmp_path, path=abstract(tree)).keys() == {"path"}


def test_modules_are_restored_as_such(tmp_path):
    path = tiny.path(classes=2)
    save(tmp_path, 1, path=path)
    found = restore(tmp_path, path=abstract(path))["path"]
    assert isinstance(found, DiffusionPath)
    assert jax.tree.structure(found) == jax.tree.structure(path)
    assert same_bits(found, path)


def test_the_newest_stay(tmp_path, tree):
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.latest() is None
    for step in (1, 2, 3):
        checkpoints.save(step, {"path": tree})
    checkpoints.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]
    assert Checkpoints(tmp_path).latest() == 3


def test_what_is_saved_does_not_change_afterwards(tmp_path):
    """The arrays of a step are donated to the next one while they are being written."""
    advance = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jnp.zeros((512, 512), jnp.float32)
    checkpoints = Checkpoints(tmp_path, keep=9)
    for step in range(1, 6):
        x = advance(x)
        checkpoints.save(step, {"path": x})
    checkpoints.close()
    for step in range(1, 6):
        assert np.all(restore(tmp_path, step, path=abstract(x))["path"] == step)


def test_a_step_that_is_there_is_left_alone(tmp_path, tree):
    save(tmp_path, 1, path=tree)
    save(tmp_path, 1, path=jax.tree.map(jnp.zeros_like, tree))
    assert same_bits(restore(tmp_path, path=abstract(tree))["path"], tree)


def test_no_array_is_cast_or_reshaped_unnoticed(tmp_path, tree):
    save(tmp_path, 3, path=tree)
    wanted = {
        "weight": jax.ShapeDtypeStruct((3, 4), jnp.float32),
        "half": jax.ShapeDtypeStruct((5,), jnp.float32),
        "new": jax.ShapeDtypeStruct((), jnp.int32),
    }
    with pytest.raises(InputError, match="checkpoint 3 does not fit this config") as caught:
        restore(tmp_path, path=wanted)
    for fault in (
        "weight is float32[4, 3], expected float32[3, 4]",
        "half is bfloat16[5], expected float32[5]",
        "new is missing",
        "count is not part of it",
    ):
        assert fault in str(caught.value)


def test_an_item_that_was_not_saved_is_named(tmp_path, tree):
    save(tmp_path, 3, path=tree)
    with pytest.raises(InputError, match="weight is missing"):
        restore(tmp_path, path=abstract(tree), optimizer=abstract(tree))


def test_a_damaged_checkpoint_is_one_line(tmp_path, tree):
    save(tmp_path, 3, path=tree)
    for file in (tmp_path / "3" / "path").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:10])
    with pytest.raises(InputError, match=r"checkpoint 3 in .* cannot be read"):
        restore(tmp_path, path=abstract(tree))


def test_leftovers_are_no_checkpoints(tmp_path, tree):
    save(tmp_path, 3, path=tree)
    (tmp_path / "5").mkdir()  # orbax takes any folder with a number for a step
    (tmp_path / "6.orbax-checkpoint-tmp").mkdir()
    assert Checkpoints(tmp_path).latest() == 3
    save(tmp_path, 4, path=tree)
    assert Checkpoints(tmp_path).latest() == 4


def test_a_step_that_orbax_would_skip_is_an_error(tmp_path, tree):
    save(tmp_path, 3, path=tree)
    with pytest.raises(RuntimeError, match="did not save step 2"):
        save(tmp_path, 2, path=tree)
