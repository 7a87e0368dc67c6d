import pytest

from l2d_jax.errors import InputError, RunError
from l2d_jax.storage import mirror
from l2d_jax.storage.bucket import Bucket, BucketError, ChangedError, check_url
from l2d_jax.storage.disk import Disk

URL = "gs://bucket/runs/one"


@pytest.fixture
def bucket(emulator):
    return Bucket(URL)


BAD = ["gs:/bucket/run", "gs://", "gs:///run", "gs://B/run", "gs://bucket//run", "s3://bucket/run", "az://bucket/run"]


@pytest.mark.parametrize("text", BAD)
def test_a_name_with_a_typo_is_one_line(text):
    with pytest.raises(InputError, match="a folder in a bucket is gs://BUCKET/FOLDER, got"):
        mirror.open_folder(text)


def sizes(folder, name):
    return {name: file.size for name, file in folder.files(name).items()}


def test_both_kinds_of_folders_say_the_same(bucket, tmp_path):
    disk = Disk(tmp_path)
    (tmp_path / "3" / "path").mkdir(parents=True)
    for folder in (disk, bucket):
        folder.write("3/a.json", b"{}")
        folder.write("3/path/d", b"\x00" * 70_000)
        folder.write("other", b"1")
    for folder in (disk, bucket):
        assert sorted(folder.names()) == ["3", "other"]
        assert sizes(folder, "3") == {"a.json": 2, "path/d": 70_000}
        assert folder.read("3/a.json") == b"{}"
        with pytest.raises(FileNotFoundError):
            folder.read("3/b.json")
    for checksum in ("xxh3", "crc32c"):
        ours, theirs = (folder.files("3")["path/d"].digest(checksum) for folder in (disk, bucket))
        assert ours == theirs
    for folder in (disk, bucket):
        folder.move("3", "3.broken")
        assert sorted(folder.names()) == ["3.broken", "other"]
        assert sizes(folder, "3.broken") == {"a.json": 2, "path/d": 70_000}
        folder.remove("3.broken")
        folder.remove("3.broken")
        folder.remove("other")
        assert folder.names() == []


def test_a_generation_is_replaced_once(bucket):
    first = bucket.write(".lock", b"one", replacing=0)
    assert bucket.generation(".lock") == first
    with pytest.raises(ChangedError):
        bucket.write(".lock", b"two", replacing=0)
    second = bucket.write(".lock", b"two", replacing=first)
    with pytest.raises(ChangedError):
        bucket.remove(".lock", replacing=first)
    assert bucket.read(".lock") == b"two"
    bucket.remove(".lock", replacing=second)
    with pytest.raises(FileNotFoundError):
        bucket.generation(".lock")


def test_an_object_is_removed_without_a_listing(bucket, emulator):
    """Which would be half of all requests by which an old checkpoint goes."""
    bucket.write("a", b"1")
    with emulator.failing(500, where="one/a/"):
        bucket.remove("a")
    assert bucket.names() == []


@pytest.mark.parametrize("status", [429, 500, 503, 0.6])
def test_requests_that_fail_for_a_while_are_repeated(bucket, emulator, monkeypatch, status):
    monkeypatch.setenv("L2D_JAX_PATIENCE", "60")
    with emulator.failing(status, times=2):
        bucket.write("a", b"1")
    with emulator.failing(status, times=1):
        assert bucket.read("a") == b"1"
    with emulator.failing(status, times=1):
        assert bucket.names() == ["a"]


@pytest.mark.parametrize("status", [429, 500, 403])
def test_requests_that_fail_for_ever_are_one_line(bucket, emulator, status):
    with emulator.failing(status), pytest.raises(BucketError) as caught:
        bucket.write("a", b"1")
    assert caught.value.strerror
    assert ("access refused, status 403" in caught.value.strerror) == (status == 403)
    kind, says = (InputError, "read") if status == 403 else (RunError, "reached")  # which may pass
    with emulator.failing(status), pytest.raises(kind, match=f"{URL}/new cannot be {says}"):
        mirror.open_folder(f"{URL}/new")


def test_a_bucket_that_is_not_there_is_one_line(emulator):
    with pytest.raises(InputError, match="there is no bucket of the name in gs://nobody/run"):
        mirror.open_folder("gs://nobody/run")


def test_a_url_is_checked_before_the_library_is_there():
    check_url("gs://my.bucket-1/a folder/run")
    check_url("gs://bucket")
