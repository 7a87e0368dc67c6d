"""Files of JSON, checked against declared types, files that are complete or absent, and fingerprints.

What others wrote, and what may have been damaged, is read in three steps: bytes, strictly as UTF-8; JSON, in which no
key may be repeated; and the types and ranges that its reader declares, mostly as a `TypedDict`. A fingerprint names
what a result was computed from by its content: names, dates and the layout of files do not count.
"""

import errno
import fcntl
import hashlib
import json
import math
import os
import stat
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeAlias

from annotated_types import Interval
from pydantic import TypeAdapter, ValidationError

from l2d_jax.errors import LONGEST_LINE, InputError, require, shorten, shown

Count = Annotated[int, Interval(ge=1, lt=2**31)]
Share = Annotated[float, Interval(ge=0, le=1)]
NotNegative = Annotated[float, Interval(ge=0, le=1e12)]
Positive = Annotated[float, Interval(gt=0, le=1e12)]
AnyPath: TypeAlias = str | os.PathLike[str]
Fingerprint: TypeAlias = Mapping[str, str]  # hashes by the name of the part, such as the weights of a base
DOWNLOAD = "download it again"
LONGEST_NAME = 255  # bytes of one name in a path, on all common file systems
LONGEST_PATH = 4096  # bytes, of Linux
_adapter: Callable[[Any], Any] = cache(TypeAdapter)


def check_text(text: str, name: str) -> None:
    """Raise `InputError`, which begins with `name`, for text that is not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{name} must be UTF-8, got {text[:80]!a}: write it in that encoding") from None


def check_path(text: str, name: str) -> None:
    """Raise `InputError`, which begins with `name`, for text that no file can be named by."""
    check_text(text, name)
    require("\0" not in text, f"{name} must have no NUL character, got {text[:80]!r}: leave it out")
    for part, limit in [*((part, LONGEST_NAME) for part in text.split("/")), (text, LONGEST_PATH)]:
        if (size := len(part.encode())) > limit:
            raise InputError(f"{name} must be at most {limit} bytes long, got {size}: {part[:60]!r}...: shorten it")


def open_file(path: AnyPath) -> BufferedReader:
    """Open a regular file for reading; raises `OSError`, for FIFOs and devices too, which might never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO would wait for its writer
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    raise OSError(errno.EINVAL, "Not a regular file", os.fspath(path))


def read_bytes(path: AnyPath) -> bytes:
    """A regular file; raises `OSError`."""
    with open_file(path) as file:
        return file.read()


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; raises `InputError` if the file is unreadable or malformed, or repeats a key."""
    try:
        return _parse(read_bytes(path))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{path}: malformed JSON ({error}): {DOWNLOAD}") from None


@cache
def package_table(name: str) -> dict[str, Any]:
    """A TOML file of this package, by its path in it; nobody may change what is returned."""
    return tomllib.loads((Path(__file__).parent / name).read_text("utf-8"))


def check(value: Any, kind: Any, where: object, *, remedy: str = DOWNLOAD) -> Any:
    """A value of JSON as the type `kind` declares it, such as a `TypedDict`, whose unknown keys are left out.

    Raises an `InputError` that begins with `where`, names the first entry that is not so, and ends with `remedy`.
    """
    try:
        return _adapter(kind).validate_python(value, strict=True)
    except ValidationError as error:
        raise InputError(f"{where}: {_fault(error)}: {remedy}") from None


def read_lines(
    path: Path, kinds: Sequence[Any], odd: Callable[[list[dict[str, Any]]], dict[int, str]]
) -> list[tuple[bytes, dict[str, Any]]]:
    """The complete lines of a file of JSON and the object in each, without the damaged ones, which a warning counts.

    An object must be of all `kinds`, as for `check`; `odd` says which contradict the others, and why. The
    file may be missing; raises `InputError` if it cannot be read.
    """
    kept: list[tuple[int, bytes, dict[str, Any]]] = []
    faults: dict[int, str] = {}  # by the number of the line
    with explained(f"cannot read {path}", "check its permissions"):
        text = read_bytes(path) if path.exists() else b""
    lines = text.split(b"\n")[:-1]  # not one that was cut off; not splitlines, which ends lines at other bytes too
    for number, line in enumerate((line + b"\n" for line in lines), start=1):
        try:
            record = _parse(line, is_finite=True)
            for kind in kinds:
                _adapter(kind).validate_python(record, strict=True)
            kept.append((number, line, record))
        except ValidationError as error:
            faults[number] = _fault(error)
        except ValueError as error:
            faults[number] = str(error)
    faults |= {kept[place][0]: fault for place, fault in odd([record for _, _, record in kept]).items()}
    if faults:
        number, fault = next(iter(faults.items()))
        more = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
        warning = f"warning: line {number} of {path} is damaged and left out{more}: {fault}"
        print(shorten(warning, LONGEST_LINE), file=sys.stderr, flush=True)
    return [(line, record) for number, line, record in kept if number not in faults]


def _parse(text: bytes, *, is_finite: bool = False) -> dict[str, Any]:
    """A JSON object, with finite numbers only if required; raises a `ValueError` of one line."""
    number = _finite if is_finite else float
    try:
        decoded = text.decode("utf-8-sig")
        value = json.loads(decoded, object_pairs_hook=_unique, parse_float=number, parse_constant=number)
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not isinstance(value, dict):
        raise ValueError(f"{type(value).__name__} in place of an object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError(f"repeated key {shown(Counter(key for key, _ in pairs).most_common(1)[0][0])}")
    return dict(pairs)


def _finite(digits: str) -> float:
    if not math.isfinite(float(digits)):
        raise ValueError(f"{shown(digits)} is not a finite number")
    return float(digits)


def _fault(error: ValidationError) -> str:
    """What is wrong with the first entry that is, in a few words."""
    first = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(part if isinstance(part, str) and len(part) < 40 else shown(part) for part in first["loc"])
    if first["type"] == "missing":
        return f"{place} is missing"
    return f"{place} {first['msg'].replace('Input should', 'must')}, got {shown(first['input'])}".strip()


def digest(value: Any) -> str:
    """The first 128 bits of the SHA-256 of a value that JSON can hold, in 32 hexadecimal digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def changes(recorded: Fingerprint, found: Fingerprint) -> list[str]:
    """A few words for each part that both fingerprints have with another hash."""
    both = [name for name in recorded if name in found]
    return [f"{name} {recorded[name][:8]}, now {found[name][:8]}" for name in both if recorded[name] != found[name]]


def differences(old: Mapping[str, Any], new: Mapping[str, Any], within: str = "") -> list[str]:
    """A few words for each entry in which two nested records, as JSON has them, differ; names begin with `within`."""
    words: list[str] = []
    for name in {**old, **new}:
        was, now = old.get(name), new.get(name)
        if isinstance(was, dict) and isinstance(now, dict):
            words += differences(was, now, f"{within}{name}.")
        elif was != now:
            words.append(f"{within}{name} was {shown(was)}, is {shown(now)}")
    return words


def require_same(recorded: Any, found: Fingerprint, *, what: str, remedy: str) -> None:
    """Raise `InputError` if a part of what a file records (nothing, in files of former versions) is another now."""
    changed = [] if recorded is None else changes(check(recorded, dict[str, str], what, remedy=remedy), found)
    require(not changed, f"{what} ({', '.join(changed)}): {remedy}")


def identity(path: Path) -> list[int]:
    """Numbers that differ once a file was written to or replaced, even if its dates were set back; raises `OSError`."""
    state = path.stat()
    return [state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns]


def cache_folder() -> Path:
    """The folder for what can be computed again: `$L2D_JAX_CACHE`, or `l2d_jax` in the user's cache folder."""
    if chosen := os.environ.get("L2D_JAX_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "l2d_jax"


def write_whole(path: Path, text: str | bytes) -> None:
    """Replace a file by `text`, on the disk: a kill or a loss of power leaves the old file or the new one, whole.

    Processes that write one file take turns, if the file system has locks; what one of them left is written over.
    """
    written = path.with_name(f"{path.name}.partial")
    with _own_file(written) as file:
        file.truncate(0)
        file.write(text.encode() if isinstance(text, str) else text)
        file.flush()
        os.fsync(file.fileno())
        written.replace(path)
    sync(path.parent)


def _own_file(path: Path) -> BinaryIO:
    """Open a file for writing, which no other process writes until it is closed; raises `OSError`."""
    while True:
        file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o666), "wb")
        with suppress(OSError):  # there are no locks here
            fcntl.flock(file, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(file.fileno())):
                return file
        file.close()  # another process has given it its name


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of files, is on the disk and not in memory alone."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def explained(problem: str, remedy: str) -> Iterator[None]:
    """Within, an `OSError` is an `InputError`: the problem, the system's reason and the remedy."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{problem}: {error.strerror}: {remedy}") from error
