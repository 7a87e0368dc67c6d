"""Folders in buckets as folders of this machine: `gs://BUCKET/run` as a temporary copy of its small files.

`open_folder` fetches them, programs read and write files as they always do, and `publish` uploads what has changed. The
large ones do not go through the copy: checkpoints are read and written in the bucket (`place`), and an export is
fetched only where it is read (`fetch`). A local folder is what it is, and all calls but `open_folder` do nothing.
"""

import atexit
import contextlib
import os
import re
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from l2d_jax.errors import InputError, RunError
from l2d_jax.files import AnyPath, identity
from l2d_jax.storage.bucket import Bucket, BucketError, RefusedError, check_url
from l2d_jax.storage.disk import Disk
from l2d_jax.storage.partial import locked_folder

LEFT_THERE = ("checkpoints", "export", "profile", "tensorboard")  # folders of a workdir that are not fetched


@dataclass
class _Mirror:
    """The copy of one folder, and what its files were when they were last the same in both places."""

    bucket: Bucket
    folder: Path
    same: dict[str, list[int]] = field(default_factory=dict)  # `identity` by name

    def fetch(self, below: str) -> None:
        for name in self.bucket.files(below):
            whole = f"{below}/{name}" if below else name
            file, top = self.folder / whole, PurePosixPath(whole).parts[0]
            if top in LEFT_THERE and not below:
                (self.folder / top).mkdir(exist_ok=True)
            elif whole not in self.same:
                file.parent.mkdir(parents=True, exist_ok=True)
                self.bucket.download(whole, file)
                self.same[whole] = identity(file)

    def publish(self, path: Path) -> None:
        """Upload what has changed at or below a path, descriptions last: JSON says what the other files are."""
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        names = {file.relative_to(self.folder).as_posix(): file for file in files}
        for name in sorted(names, key=lambda name: (name.endswith(".json"), name)):
            if not name.endswith(".partial") and self.same.get(name) != (now := identity(names[name])):
                self.bucket.upload(name, names[name])
                self.same[name] = now
        for name in [name for name in self.same if not (self.folder / name).exists()]:
            self.bucket.remove(name)
            del self.same[name]


_mirrors: dict[str, _Mirror] = {}  # by URL


def open_folder(name: AnyPath) -> Path:
    """The folder `name`, or the copy of it if it is in a bucket, whose small files are fetched.

    Raises `InputError` for a bucket that is absent or refuses access, and `RunError` for one that cannot be reached.
    """
    url = os.fspath(name)
    if not re.match("[a-z0-9]+:/", url):
        return Path(name)
    check_url(url)
    if (url := url.rstrip("/")) not in _mirrors:
        # Its last parts are those of the URL, since reports and errors show them.
        until_exit = contextlib.ExitStack()
        atexit.register(until_exit.close)
        root = until_exit.enter_context(locked_folder(Path(tempfile.gettempdir()), "l2d_jax_mirror_", ""))
        mirror = _Mirror(Bucket(url), Path(root, url.removeprefix("gs://")))
        mirror.folder.mkdir(parents=True)
        try:
            mirror.fetch("")
        except FileNotFoundError:
            raise InputError(f"there is no bucket of the name in {url}: check it, or create the bucket") from None
        except RefusedError as error:
            raise InputError(f"{url} cannot be read ({error.strerror}): mend that, or choose another folder") from None
        except BucketError as error:
            raise RunError(f"{url} cannot be reached ({error.strerror}): give the same command again later") from None
        _mirrors[url] = mirror
    return _mirrors[url].folder


def _mirror_of(path: Path) -> _Mirror | None:
    return next((mirror for mirror in _mirrors.values() if path.is_relative_to(mirror.folder)), None)


def place(path: Path) -> Disk | Bucket:
    """Where a folder really is."""
    mirror = _mirror_of(path)
    if mirror is None:
        return Disk(path.absolute())
    below = path.relative_to(mirror.folder).as_posix()
    return mirror.bucket if below == "." else Bucket(f"{mirror.bucket}/{below}")


def fetch(path: Path) -> None:
    """Fetch a folder that `open_folder` has left in the bucket; raises `OSError`."""
    if (mirror := _mirror_of(path)) is not None:
        mirror.fetch(path.relative_to(mirror.folder).as_posix())


def publish(path: Path) -> None:
    """Upload what has changed at or below a path; raises `OSError`."""
    if (mirror := _mirror_of(path)) is not None:
        mirror.publish(path)


def publish_all() -> None:
    """Upload everything that has changed, at the end of a program; raises `RunError`."""
    for url, mirror in _mirrors.items():
        try:
            mirror.publish(mirror.folder)
        except OSError as error:
            kept = tempfile.mkdtemp(prefix="l2d_jax_kept_")  # the copy itself goes as the program ends
            shutil.copytree(mirror.folder, kept, dirs_exist_ok=True)
            raise RunError(f"{url} cannot be written ({error.strerror}): what is missing there is in {kept}") from error


def shown_places(text: str) -> str:
    """A message in which every copy has the name of its folder in the bucket."""
    for url, mirror in _mirrors.items():
        text = text.replace(str(mirror.folder), url)
    return text
