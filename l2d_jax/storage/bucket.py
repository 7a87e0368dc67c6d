"""A folder in a bucket of Google Cloud Storage, by the calls that a folder on a disk has, too (`storage/disk.py`).

An object is replaced whole and is seen by all hosts at once. A request that fails is repeated for `L2D_JAX_PATIENCE`
seconds (60). The library is the extra `gcs`, and nothing of it is imported before a bucket is named.
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
    """A request that failed for good; `strerror` says why."""


class RefusedError(BucketError):
    """A request for which the account of this machine has no permission."""


class ChangedError(BucketError):
    """An object that is not of the generation that was to be replaced or removed."""


def check_url(text: str) -> None:
    """Raise `InputError` for text that means a bucket and names none, and for other kinds of URLs."""
    if "//" in text.removeprefix(SCHEME) or not _URL.fullmatch(text):
        raise InputError(f"a folder in a bucket is gs://BUCKET/FOLDER, got {shown(text)}: mend it, or name a local one")


@dataclass(frozen=True)
class Bucket:
    """A folder `gs://BUCKET/FOLDER`; all calls raise `BucketError`, and `FileNotFoundError` for an absent object."""

    url: str
    checksum: ClassVar[str] = "crc32c"  # which the bucket has ready for each object

    def __str__(self) -> str:
        return self.url

    def names(self) -> list[str]:
        """The objects and folders directly in it."""
        with _translated(self.url):
            listing = _client().list_blobs(self._bucket, prefix=self._prefix, delimiter="/", **_limits())
            objects = [blob.name for blob in listing]
            return [name.removeprefix(self._prefix).rstrip("/") for name in (*objects, *listing.prefixes)]

    def files(self, folder: str = "") -> dict[str, File]:
        """Every object below a folder, by its name from there; an object has to be read for "xxh3"."""
        prefix = f"{self._prefix}{folder}/" if folder else self._prefix
        with _translated(self.url):
            listing = _client().list_blobs(self._bucket, prefix=prefix, **_limits())
            # Some tools make an empty object NAME/ for a folder.
            blobs = {blob.name.removeprefix(prefix): blob for blob in listing if not blob.name.endswith("/")}
        return {name: File(blob.size, partial(self._digest, blob)) for name, blob in blobs.items()}

    def generation(self, name: str) -> int:
        """The number of an object's content, which every writing changes."""
        with self._request(name) as blob:
            blob.reload(**_limits())
            return int(blob.generation)

    def read(self, name: str) -> bytes:
        """An object."""
        with self._request(name) as blob:
            return bytes(blob.download_as_bytes(**_limits()))

    def write(self, name: str, data: bytes, *, replacing: int | None = None) -> int:
        """Replace an object; raises `ChangedError` unless it is of generation `replacing` (0: absent; None: any)."""
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
        """Remove an object (of generation `replacing`), or else a folder; raises nothing if there is neither."""
        with contextlib.suppress(FileNotFoundError), self._request(name) as blob:
            blob.delete(if_generation_match=replacing, **_limits())
            return  # an object needs no listing
        for below in self.files(name) if replacing is None else ():
            self.remove(f"{name}/{below}")

    def settle(self, folder: str) -> None:
        """Return at once: an object that was written stays."""

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
        import gcsfs  # noqa: F401 - which orbax needs
        from fsspec.config import conf
        from google.auth.exceptions import GoogleAuthError
        from google.cloud import storage
    except ImportError:
        raise InputError("gs:// needs the extra gcs: pip install 'l2d_jax[gcs]'") from None
    # orbax would see former listings, and not what this module and other hosts have written since.
    conf["gcs"] = {**conf.get("gcs", {}), "use_listings_cache": False}
    try:
        # The project matters for making buckets alone, but the library insists on one.
        return storage.Client(project=os.environ.get("GOOGLE_CLOUD_PROJECT", "l2d-jax"))
    except GoogleAuthError as error:
        remedy = "run gcloud auth application-default login, or give the machine a service account"
        raise InputError(f"gs:// needs credentials ({_short(error)}): {remedy}") from None


def _limits() -> dict[str, Any]:
    """How long every request may take, and how long it is repeated."""
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
    except Exception as error:  # of google.auth, google.api_core, requests and urllib3
        code = int(error.code or 0) if isinstance(error, GoogleAPICallError) else 0
        if code in (401, 403):
            reason = f"access refused, status {code}: check the permissions of this machine's account"
            raise RefusedError(0, reason, url) from error
        raise BucketError(0, _short(error), url) from error


def _short(error: Exception) -> str:
    cause = getattr(error, "cause", None) or error  # of a RetryError
    return shorten(" ".join(str(cause).split()) or type(cause).__name__, 120)
