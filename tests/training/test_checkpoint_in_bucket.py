"""The checkpoints of test_checkpoint.py in a bucket: every kind of damage, and requests that fail."""

import jax
import jax.numpy as jnp
import pytest

from l2d_jax.errors import RunError
from l2d_jax.storage import mirror
from l2d_jax.storage.bucket import Bucket
from l2d_jax.training import manifest
from l2d_jax.training.checkpoint import SURPLUS, Checkpoints
from tests.support.marks import slow
from tests.support.programs import same_bits

URL = "gs://bucket/runs/one"
DAMAGE = {
    "flipped": lambda data: bytes([*data[:-1], data[-1] ^ 4]),
    "cut": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "removed": None,
}


def trees(step):
    return {"path": {"a": jnp.full((16, 16), step, jnp.float32)}, "optimizer": {"b": jnp.int32(step)}}


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def open_checkpoints(**options):
    return Checkpoints(mirror.open_folder(URL) / "checkpoints", **options)


def listing(bucket):
    return {name: (file.size, file.digest("crc32c")) for name, file in bucket.files().items()}


@pytest.fixture(scope="module")
def two_steps(bucket_server):
    """The objects of a good step 1 and a good step 2, of other values."""
    mirror._mirrors.clear()
    checkpoints = open_checkpoints(keep=2)
    for step in (1, 2):
        checkpoints.save(step, trees(step))
    assert checkpoints.failures() == []
    checkpoints.close()
    return {name: data for name, data in bucket_server.files().items() if name.startswith("runs/one/checkpoints/")}


@pytest.fixture
def bucket(emulator, two_steps):
    """That folder, as it was."""
    folder = Bucket("gs://bucket")
    for name, data in two_steps.items():
        folder.write(name, data)
    return Bucket(f"{URL}/checkpoints")


def test_every_bit_comes_back(bucket):
    checkpoints = open_checkpoints()
    assert checkpoints.latest() == 2
    assert same_bits(checkpoints.restore(2, abstract(trees(2))), trees(2))
    assert sorted(bucket.names()) == ["1", "2"]
    assert {name for name in bucket.files("2") if "/" not in name} >= {manifest.NAME, "commit_success.txt"}


@pytest.mark.parametrize("is_whole", [False, *slow(True)])
def test_every_damaged_object_is_noticed(bucket, capsys, is_whole):
    """Each object of the newest step, in one way or in each; the step stays as it is."""
    for number, name in enumerate(sorted(bucket.files("2"))):
        good = bucket.read(f"2/{name}")
        chosen = DAMAGE if is_whole or name == manifest.NAME else [[*DAMAGE][number % len(DAMAGE)]]
        for damage in chosen:
            change = DAMAGE[damage]
            if change is None:
                bucket.remove(f"2/{name}")
            elif good:
                bucket.write(f"2/{name}", change(good))
            before = listing(bucket)
            assert open_checkpoints().latest() == (1 if good or change is None else 2), (name, damage)
            assert (f"checkpoint 2 in {bucket} is passed over" in capsys.readouterr().err) == bool(good or not change)
            assert listing(bucket) == before
            bucket.write(f"2/{name}", good)
    assert open_checkpoints().latest() == 2


def test_a_bad_step_that_is_saved_anew_is_moved_aside_and_surplus_goes(bucket, capsys):
    bucket.remove(f"2/{manifest.NAME}")
    checkpoints = open_checkpoints(keep=2)
    for step in (2, 3):
        checkpoints.save(step, trees(step))
    assert checkpoints.failures() == []
    assert f"what there was of checkpoint 2 is now in {bucket}/2.broken\n" in capsys.readouterr().err
    assert sorted(bucket.names()) == ["2", "2.broken", "3"]
    assert same_bits(checkpoints.restore(2, abstract(trees(2))), trees(2))
    bucket.write(f"2/{SURPLUS}", b"")
    checkpoints = open_checkpoints(keep=2)
    assert checkpoints.latest() == 3
    checkpoints.save(4, trees(4))
    checkpoints.close()
    assert sorted(bucket.names()) == ["2.broken", "3", "4"]


@pytest.mark.parametrize("status", [429, *slow(500)])
def test_a_save_waits_for_a_bucket_that_fails_for_a_while(bucket, emulator, monkeypatch, status):
    monkeypatch.setenv("L2D_JAX_PATIENCE", "60")
    checkpoints = open_checkpoints(keep=2)
    with emulator.failing(status, times=5, where="checkpoints"):
        checkpoints.save(3, trees(3))
        assert checkpoints.failures() == []
    assert open_checkpoints().latest() == 3


def test_a_save_that_fails_is_a_line_and_the_next_one_works(bucket, emulator, capsys):
    checkpoints = open_checkpoints(keep=2)
    with emulator.failing(403, where="checkpoints/3"):
        checkpoints.save(3, trees(3))
        assert checkpoints.failures() == [3]
    assert "checkpoint of step 3 was not saved (" in capsys.readouterr().err
    checkpoints.save(4, trees(4))
    assert checkpoints.failures() == []
    assert checkpoints.latest() == 4


def test_a_bucket_that_cannot_be_reached_is_not_one_without_checkpoints(bucket, emulator):
    """Training would begin anew."""
    checkpoints = open_checkpoints()
    with emulator.failing(500), pytest.raises(RunError, match=f"{bucket} cannot be read .*: give the same command"):
        checkpoints.latest()
