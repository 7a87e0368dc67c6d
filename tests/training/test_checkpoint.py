import errno
import json
import os
import shutil
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from l2d_jax.errors import InputError
from l2d_jax.model.diffusion_path import DiffusionPath
from l2d_jax.training import manifest
from l2d_jax.training.checkpoint import SURPLUS, Checkpoints
from tests.support import tiny
from tests.support.marks import slow
from tests.support.odd_files import ODD, make_odd
from tests.support.programs import full_disk, same_bits


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No test waits for the disk; none turns off the power."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


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


def test_a_checkpoint_that_orbax_cannot_read_is_one_line(tmp_path, tree, monkeypatch):
    """Though its files are as they were saved."""
    save(tmp_path, 3, path=tree)
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.latest() == 3
    shutil.rmtree(tmp_path / "3" / "path")
    with pytest.raises(InputError, match=r"checkpoint 3 in .* cannot be read \("):
        checkpoints.restore(3, {"path": abstract(tree)})


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """A good step 1 and a good step 2, of other values."""
    folder = tmp_path_factory.mktemp("steps") / "checkpoints"
    checkpoints = Checkpoints(folder, keep=2)
    for step in (1, 2):
        checkpoints.save(step, trees(step))
    checkpoints.close()
    return folder


def trees(step):
    return {"path": {"a": jnp.full((16, 16), step, jnp.float32)}, "optimizer": {"b": jnp.int32(step)}}


def content(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def truncate(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def empty(file):
    file.write_bytes(b"")


FILES = {  # every kind that a step has
    "the arrays": "path/ocdbt.process_0/d/*",
    "the arrays' index": "path/d/*",
    "the arrays' database": "path/manifest.ocdbt",
    "a process's database": "path/ocdbt.process_0/manifest.ocdbt",
    "names and shapes": "path/_METADATA",
    "placements": "path/_sharding",
    "chunks": "path/array_metadatas/process_0",
    "the optimizer's arrays": "optimizer/ocdbt.process_0/d/*",
    "times": "_CHECKPOINT_METADATA",
    "orbax's mark of an item": "path/commit_success.txt",
    "orbax's mark of the step": "commit_success.txt",
    "the manifest": "manifest.json",
}
ONE_FILE = [(damage, name) for damage in (truncate, empty, Path.unlink) for name in FILES]
FLIPPED = [(flip, name) for name in FILES]  # which `test_every_byte_counts` does, too
ODD_FILES = [(partial(make_odd, kind=kind), "the manifest") for kind in ODD]
OTHERS = ("names and shapes", "orbax's mark of the step")
MORE_ODD = [(partial(make_odd, kind=kind), name) for name in OTHERS for kind in ODD]


def remove_files(step):
    shutil.rmtree(step)
    step.mkdir()


def cut_off(step):
    """As orbax leaves a step that it has not written to its end."""
    step.rename(step.with_name("2.orbax-checkpoint-tmp"))


def put_another_in_its_place(step):
    shutil.rmtree(step)
    shutil.copytree(step.with_name("1"), step)


def slow_pairs(*pairs):
    return [pytest.param(*pair, marks=pytest.mark.slow) for pair in pairs]


WHOLE = [(damage, None) for damage in (remove_files, cut_off, put_another_in_its_place)]


def spoil(folder, damage, name):
    damage(folder / "2" if name is None else max(folder.glob(f"2/{FILES[name]}"), key=lambda path: path.stat().st_size))


@pytest.mark.parametrize(("damage", "name"), [*ONE_FILE, *slow_pairs(*FLIPPED, *MORE_ODD), *ODD_FILES, *WHOLE])
def test_the_older_step_is_used_and_the_bad_one_kept(two_steps, tmp_path, capsys, damage, name):
    """Whatever is wrong with the newer one: it is named, and left as it is."""
    folder = Path(shutil.copytree(two_steps, tmp_path / "checkpoints"))
    spoil(folder, damage, name)
    before = content(folder)
    checkpoints = Checkpoints(folder, keep=2)
    assert checkpoints.latest() == 1
    warning = capsys.readouterr().err
    assert warning.startswith(f"warning: checkpoint 2 in {folder} is passed over, and left as it is: ")
    assert warning.count("\n") == 1
    assert len(warning.replace(str(folder), "")) < 300
    assert same_bits(checkpoints.restore(1, abstract(trees(1))), trees(1))
    assert content(folder) == before


@pytest.mark.parametrize(("damage", "name"), [(flip, "the arrays"), (Path.unlink, "the manifest"), *WHOLE])
def test_a_bad_step_that_is_saved_anew_is_moved_aside(two_steps, tmp_path, capsys, damage, name):
    folder = Path(shutil.copytree(two_steps, tmp_path / "checkpoints"))
    spoil(folder, damage, name)
    bad = {path.relative_to(path.parts[0]): data for path, data in content(folder).items() if path.parts[0] != "1"}
    checkpoints = Checkpoints(folder, keep=2)
    for step in (2, 3):
        checkpoints.save(step, trees(2))
    assert checkpoints.failures() == []
    assert f"what there was of checkpoint 2 is now in {folder / '2.broken'}\n" in capsys.readouterr().err
    assert checkpoints.latest() == 3
    assert same_bits(restore(folder, 2, **abstract(trees(2))), trees(2))
    assert content(folder / "2.broken") == bad


MADE = [Path.mkdir, Path.touch, *(partial(make_odd, kind=kind) for kind in ODD)]
NAMES = ["9" * 200, "3", "3.orbax-checkpoint-tmp", "004"]


@pytest.mark.parametrize(
    ("name", "made"),
    [
        *(("3", made) for made in MADE),
        *((name, Path.mkdir) for name in NAMES if name != "3"),
        *slow_pairs(*((name, made) for name in NAMES if name != "3" for made in MADE[1:])),
    ],
)
def test_what_has_the_name_of_a_step_and_is_none(two_steps, tmp_path, capsys, name, made):
    folder = Path(shutil.copytree(two_steps, tmp_path / "checkpoints"))
    made(folder / name)
    checkpoints = Checkpoints(folder, keep=1)
    assert checkpoints.latest() == 2
    [warning] = capsys.readouterr().err.splitlines()
    assert warning.startswith("warning: checkpoint ")
    assert len(warning) <= 300
    checkpoints.save(5, trees(5))
    assert (checkpoints.failures(), checkpoints.latest()) == ([], 5)
    assert os.path.lexists(folder / name)


@pytest.mark.parametrize("bit", [0, *slow(*range(1, 7)), 7])
def test_every_byte_counts(two_steps, tmp_path, bit):
    """One bit of any one byte of any file, also of those that were chosen above for their size."""
    rng = np.random.default_rng(bit)
    folder = Path(shutil.copytree(two_steps, tmp_path / "checkpoints"))
    for file in [path for path in folder.glob("2/**/*") if path.is_file()]:
        good = file.read_bytes()
        data = bytearray(good)
        data[rng.integers(len(data))] ^= 1 << bit
        file.write_bytes(data)
        changed = file.name != manifest.NAME or json.loads(good) != try_json(data)
        assert Checkpoints(folder).latest() == (1 if changed else 2), file
        file.write_bytes(good)
    assert Checkpoints(folder).latest() == 2


def try_json(data):
    """None where it is none; a bit of white space may turn into other white space."""
    try:
        return json.loads(bytes(data))
    except ValueError:
        return None


def test_no_good_step_is_none(two_steps, tmp_path, capsys):
    folder = Path(shutil.copytree(two_steps, tmp_path / "checkpoints"))
    for step in (1, 2):
        (folder / str(step) / manifest.NAME).unlink()
    assert Checkpoints(folder).latest() is None
    assert capsys.readouterr().err.count("it has no manifest.json: its save was cut off, or has not ended") == 2


def test_only_good_steps_count_among_those_that_stay(two_steps, tmp_path):
    folder = Path(shutil.copytree(two_steps, tmp_path / "checkpoints"))
    flip(folder / "2" / "path" / "_METADATA")
    checkpoints = Checkpoints(folder, keep=2)
    for step, there in ((3, "123"), (4, "234"), (5, "245")):
        checkpoints.save(step, trees(step))
        assert checkpoints.latest() == step
        assert sorted(path.name for path in folder.iterdir()) == sorted({*there, "2"})
    checkpoints.close()


def test_a_deletion_that_was_cut_off_is_ended(two_steps, tmp_path, capsys):
    folder = Path(shutil.copytree(two_steps, tmp_path / "checkpoints"))
    (folder / "1" / SURPLUS).touch()
    (folder / "1" / manifest.NAME).unlink()
    assert Checkpoints(folder).latest() == 2
    assert capsys.readouterr().err == ""  # it is no step that was cut off
    save(folder, 3, **trees(3))
    assert sorted(path.name for path in folder.iterdir()) == ["2", "3"]


@pytest.fixture
def no_folder_is_renamed(monkeypatch):
    """As a bucket that is mounted without a hierarchical namespace refuses it."""

    def refusing(rename):
        def renamed(source, *rest, **options):
            if os.path.isdir(source):
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), source)
            return rename(source, *rest, **options)

        return renamed

    for name in ("rename", "replace", "renames"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))


def test_no_folder_is_renamed(two_steps, tmp_path, no_folder_is_renamed):
    """Saving, moving a bad step aside, deleting surplus ones, restoring."""
    folder = Path(shutil.copytree(two_steps, tmp_path / "checkpoints"))
    with pytest.raises(OSError, match="Too many open files"):
        (folder / "1").rename(folder / "elsewhere")
    flip(folder / "2" / "manifest.json")
    checkpoints = Checkpoints(folder, keep=2)
    for step in (2, 3):
        checkpoints.save(step, trees(step))
        assert checkpoints.failures() == []
    assert sorted(path.name for path in folder.iterdir()) == ["2", "2.broken", "3"]
    assert same_bits(checkpoints.restore(3, abstract(trees(3))), trees(3))
    checkpoints.close()


def test_reading_changes_nothing(two_steps, tmp_path, tree):
    """While a run saves: what it has under way, and what it deletes."""
    folder = Path(shutil.copytree(two_steps, tmp_path / "checkpoints"))
    (folder / "3").mkdir()
    (folder / "4.orbax-checkpoint-tmp").mkdir()
    shutil.copytree(folder / "1", folder / "0")
    (folder / "0" / SURPLUS).touch()
    before, names = content(folder), sorted(folder.rglob("*"))
    checkpoints = Checkpoints(folder)
    assert same_bits(checkpoints.restore(checkpoints.latest(), abstract(trees(2))), trees(2))
    checkpoints.close()
    assert (content(folder), sorted(folder.rglob("*"))) == (before, names)


def test_a_step_that_was_broken_twice_is_kept_twice(two_steps, tmp_path):
    folder = Path(shutil.copytree(two_steps, tmp_path / "checkpoints"))
    for _ in range(2):
        flip(folder / "2" / "manifest.json")
        save(folder, 2, **trees(2))
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2", "2.broken", "2.broken1"]


def test_a_save_that_fails_at_once_is_a_line_and_the_next_one_works(tmp_path, tree, capsys):
    """The folder of checkpoints cannot be made: a file is where it would be."""
    folder = tmp_path / "checkpoints"
    folder.write_text("here first")
    checkpoints = Checkpoints(folder, keep=2)
    checkpoints.save(1, {"path": tree})
    assert "of step 1 was not saved (Not a directory): training goes on; there is no good" in capsys.readouterr().err
    assert checkpoints.latest() is None
    folder.unlink()
    checkpoints.save(2, {"path": tree})
    assert checkpoints.failures() == [1]
    assert checkpoints.failures() == []
    assert checkpoints.latest() == 2


@pytest.mark.parametrize("arrays", [1, 40])
def test_a_save_on_a_full_disk_is_a_line_and_the_next_one_works(tmp_path, capsys, arrays):
    """Also where many writes are under way; orbax keeps some of their errors for later, and says much of each."""
    trees = {"path": {f"w{i}": jnp.full((64, 64), i, jnp.float32) for i in range(arrays)}, "optimizer": jnp.int32(1)}
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, trees)
    assert checkpoints.failures() == []
    with full_disk():
        checkpoints.save(2, trees)
        assert checkpoints.failures() == [2]
    assert capsys.readouterr().err.count("\n") == 1
    checkpoints.save(3, trees)
    assert checkpoints.failures() == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "3"]
    assert checkpoints.latest() == 3


def test_a_save_that_fails_later_is_a_line_and_the_next_one_works(tmp_path, tree, capsys, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, {"path": tree})
    assert checkpoints.failures() == []
    monkeypatch.setattr(manifest, "write_manifest", full)
    checkpoints.save(2, {"path": tree})
    assert checkpoints.failures() == [2]
    what = "checkpoint of step 2 was not saved (No space left on device)"
    assert capsys.readouterr().err == f"warning: {what}: training goes on; the newest good one is step 1\n"
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    monkeypatch.undo()
    checkpoints.save(3, {"path": tree})
    assert checkpoints.failures() == []
    assert checkpoints.latest() == 3


def test_what_has_to_come_first_comes_first(tmp_path, tree, capsys):
    def fail():
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"path": tree}, first=fail)
    assert checkpoints.failures() == [1]
    assert "was not saved (Disk quota exceeded)" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
