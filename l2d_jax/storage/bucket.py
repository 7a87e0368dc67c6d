"""A folder in a bucket of Google Cloud Storage, with the same methods as a folder on a disk (`storage/disk.py`).

An object is replaced atomically, and all hosts see the new content at once. A failed request is repeated for
`L2D_JAX_PATIENCE` seconds (60). The library is the extra `gcs`; it is imported only when a bucket is used.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, ClassVar

import xxhash

from l2d_jax.errors import InputError, shorten, shown
from l2d_jax.storage.disk import File

SCHEME = "gs://"
_URL = re.compile(r"gs://[a-z0-9][a-z0-9._-]{1,220}[a-z0-9](/.*)?")
PATIENCE = "L2D_JAX_PATIENCE"


class BucketError(OSError):
    """A request has finally failed; `strerror` says why."""


class RefusedError(BucketError):
    """The account of this machine has no permission for a request."""


class ChangedError(BucketError):
    """An object does not have the generation that was to be replaced or removed."""


def check_url(text: str) -> None:
    """Raise `InputError` for a malformed bucket URL, and for other kinds of URLs."""
    if "//" in text.removeprefix(SCHEME) or not _URL.fullmatch(text):
        raise InputError(f"a folder in a bucket is gs://BUCKET/FOLDER, got {shown(text)}: fix it, or name a local one")


@dataclass(frozen=True)
class Bucket:
    """A folder `gs://BUCKET/FOLDER`; all calls raise `BucketError`, and `FileNotFoundError` for an absent object."""

    url: str
    checksum: ClassVar[str] = "crc32c"  # the bucket stores it for each object

    def __str__(self) -> str:
        return self.url

    def names(self) -> list[str]:
        """The names of objects and folders directly in this folder."""
        with _translated(self.url):
            listing = _client().list_blobs(self._bucket, prefix=self._prefix, delimiter="/", **_limits())
            objects = [blob.name for blob in listing]
            return [name.removeprefix(self._prefix).rstrip("/") for name in (*objects, *listing.prefixes)]

    def files(self, folder: str = "") -> dict[str, File]:
        """All objects below a folder, keyed by their relative names. For the digest "xxh3", an object must be read."""
        prefix = f"{self._prefix}{folder}/" if folder else self._prefix
        with _translated(self.url):
            listing = _client().list_blobs(self._bucket, prefix=prefix, **_limits())
            # Some tools make an empty object NAME/ for a folder.
            blobs = {blob.name.removeprefix(prefix): blob for blob in listing if not blob.name.endswith("/")}
        return {name: File(blob.size, partial(self._digest, blob)) for name, blob in blobs.items()}

    def generation(self, name: str) -> int:
        """The generation of an object: a number that changes with every write."""
        with self._request(name) as blob:
            blob.reload(**_limits())
            return int(blob.generation)

    def read(self, name: str) -> bytes:
        """Read an object."""
        with self._request(name) as blob:
            return bytes(blob.download_as_bytes(**_limits()))

    def write(self, name: str, data: bytes, *, replacing: int | None = None) -> int:
        """Replace an object; raises `ChangedError` unless it has generation `replacing` (0: absent; None: any)."""
        with self._request(name) as blob:
            blob.upload_from_string(data, if_generation_match=replacing, checksum="crc32c", **_limits())
            return int(blob.generation)

    def upload(self, name: str, file: os.PathLike[str]) -> None:
        """Replace an object by a file."""
        with self._request(name) as blob:
            blob.upload_from_filename(os.fspath(file), checksum="crc32c", **_limits())

    def download(self, name: str, file: os.PathLike[str]) -> None:
        """Write an object into a file."""
        with self._request(name) as blob:
            blob.download_to_filename(os.fspath(file), checksum="crc32c", **_limits())

    def move(self, folder: str, to: str) -> None:
        """Move the objects of a folder, one by one, into another."""
        for name in self.files(folder):
            with self._request(f"{folder}/{name}") as blob:
                self._bucket.copy_blob(blob, self._bucket, f"{self._prefix}{to}/{name}", **_limits())
            self.remove(f"{folder}/{name}")

    def remove(self, name: str, *, replacing: int | None = None) -> None:
        """Remove an object (with generation `replacing`), or else a folder; does nothing if there is neither."""
        with contextlib.suppress(FileNotFoundError), self._request(name) as blob:
            blob.delete(if_generation_match=replacing, **_limits())
            return  # it was an object: no listing is needed
        for below in self.files(name) if replacing is None else ():
            self.remove(f"{name}/{below}")

    def settle(self, folder: str) -> None:
        """Return immediately: a written object is durable."""

    @cached_property
    def _prefix(self) -> str:
        folder = self.url.removeprefix(SCHEME).partition("/")[2].strip("/")
        return f"{folder}/" if folder else ""

    @cached_property
    def _bucket(self) -> Any:
        return _client().bucket(self.url.removeprefix(SCHEME).partition("/")[0])

    @contextlib.contextmanager
    def _request(self, name: str) -> Iterator[Any]:
        with _translated(f"{self.url.rstrip('/')}/{name}"):
            yield self._bucket.blob(self._prefix + name)

    def _digest(self, blob: Any, checksum: str) -> str:
        if checksum == self.checksum:
            return str(blob.crc32c)
        return str(xxhash.xxh3_64_hexdigest(self.read(blob.name.removeprefix(self._prefix))))


@cache
def _client() -> Any:
    try:
        import gcsfs  # noqa: F401 - orbax needs it
        from fsspec.config import conf
        from google.auth.exceptions import GoogleAuthError
        from google.cloud import storage
    except ImportError:
        raise InputError("gs:// needs the extra gcs: pip install 'l2d_jax[gcs]'") from None
    # Otherwise orbax would see old listings, without what this module and other hosts have written since.
    conf["gcs"] = {**conf.get("gcs", {}), "use_listings_cache": False}
    try:
        # A project is needed only for creating buckets, but the library requires one.
        return storage.Client(project=os.environ.get("GOOGLE_CLOUD_PROJECT", "l2d-jax"))
    except GoogleAuthError as error:
        remedy = "run gcloud auth application-default login, or give the machine a service account"
        raise InputError(f"gs:// needs credentials ({_short(error)}): {remedy}") from None


def _limits() -> dict[str, Any]:
    """How long a request may take, and how long it is repeated."""
    from google.cloud.storage.retry import DEFAULT_RETRY

    patience = float(os.environ.get(PATIENCE, "60"))
    return {"timeout": min(patience, 60.0), "retry": DEFAULT_RETRY.with_delay(initial=0.3).with_timeout(patience)}


@contextlib.contextmanager
def _translated(url: str) -> Iterator[None]:
    """Turn the errors of the library and of the network into those of this module."""
    from google.api_core.exceptions import GoogleAPICallError, NotFound, PreconditionFailed

    try:
        yield
    except NotFound as error:
        raise FileNotFoundError(2, "No such object or bucket", url) from error
    except PreconditionFailed as error:
        raise ChangedError(0, "another process has written it", url) from error
    except OSError:
        raise
    except Exception as error:  # from google.auth, google.api_core, requests and urllib3
        code = int(error.code or 0) if isinstance(error, GoogleAPICallError) else 0
        if code in (401, 403):
            reason = f"access refused, status {code}: check the permissions of this machine's account"
            raise RefusedError(0, reason, url) from error
        raise BucketError(0, _short(error), url) from error


def _short(error: Exception) -> str:
    cause = getattr(error, "cause", None) or error  # the cause of a RetryError
    return shorten(" ".join(str(cause).split()) or type(cause).__name__, 120)
