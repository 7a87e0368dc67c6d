"""Local copies of folders in buckets: `gs://BUCKET/run` becomes a temporary folder with its small files.

`open_folder` fetches the small files, programs read and write them as usual, and `publish` uploads what has changed.
Large files are not copied: checkpoints are read and written in the bucket (`place`), and an export is fetched only when
it is read (`fetch`). For a local folder, `open_folder` returns it, and the other functions do nothing.
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
    """The local copy of a folder, and the state of its files when both copies were last equal."""

    bucket: Bucket
    folder: Path
    same: dict[str, list[int]] = field(default_factory=dict)  # `identity` of each file name

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
        """Upload what has changed at or below a path. JSON files go last, because they describe the other files."""
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        names = {file.relative_to(self.folder).as_posix(): file for file in files}
        for name in sorted(names, key=lambda name: (name.endswith(".json"), name)):
            if not name.endswith(".partial") and self.same.get(name) != (now := identity(names[name])):
                self.bucket.upload(name, names[name])
                self.same[name] = now
        for name in [name for name in self.same if not (self.folder / name).exists()]:
            self.bucket.remove(name)
            del self.same[name]


_mirrors: dict[str, _Mirror] = {}  # keys: URLs


def open_folder(name: AnyPath) -> Path:
    """The folder `name`; if it is in a bucket, a local copy with its small files.

    Raises `InputError` for a bucket that does not exist or refuses access, and `RunError` if it cannot be reached.
    """
    url = os.fspath(name)
    if not re.match("[a-z0-9]+:/", url):
        return Path(name)
    check_url(url)
    if (url := url.rstrip("/")) not in _mirrors:
        # The last parts of its path equal those of the URL, because reports and errors show them.
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
            raise InputError(f"{url} cannot be read ({error.strerror}): fix that, or choose another folder") from None
        except BucketError as error:
            raise RunError(f"{url} cannot be reached ({error.strerror}): give the same command again later") from None
        _mirrors[url] = mirror
    return _mirrors[url].folder


def _mirror_of(path: Path) -> _Mirror | None:
    return next((mirror for mirror in _mirrors.values() if path.is_relative_to(mirror.folder)), None)


def place(path: Path) -> Disk | Bucket:
    """The real location of a folder."""
    mirror = _mirror_of(path)
    if mirror is None:
        return Disk(path.absolute())
    below = path.relative_to(mirror.folder).as_posix()
    return mirror.bucket if below == "." else Bucket(f"{mirror.bucket}/{below}")


def fetch(path: Path) -> None:
    """Fetch a folder that `open_folder` did not fetch; raises `OSError`."""
    if (mirror := _mirror_of(path)) is not None:
        mirror.fetch(path.relative_to(mirror.folder).as_posix())


def publish(path: Path) -> None:
    """Upload what has changed at or below a path; raises `OSError`."""
    if (mirror := _mirror_of(path)) is not None:
        mirror.publish(path)


def publish_all() -> None:
    """Upload everything that has changed; called at the end of a program. Raises `RunError`."""
    for url, mirror in _mirrors.items():
        try:
            mirror.publish(mirror.folder)
        except OSError as error:
            kept = tempfile.mkdtemp(prefix="l2d_jax_kept_")  # the copy is removed when the program ends
            shutil.copytree(mirror.folder, kept, dirs_exist_ok=True)
            raise RunError(f"{url} cannot be written ({error.strerror}): what is missing there is in {kept}") from error


def shown_places(text: str) -> str:
    """Replace the paths of local copies in a message by the URLs of their folders."""
    for url, mirror in _mirrors.items():
        text = text.replace(str(mirror.folder), url)
    return text
