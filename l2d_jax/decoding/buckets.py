"""Keeps the number of compiled programs small: lengths are padded to a few sizes, and old programs are dropped."""

import contextlib
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from l2d_jax.distributed import sharding

SHORTEST_BUCKET = 32  # tokens
# Where requests arrive one at a time, buckets are few, since prompts and answers of all lengths meet in the same lanes.
SHORTEST_SERVED = 64  # tokens that a prompt is padded to
LANE_BUCKETS = (256, 1024)  # tokens; larger ones are powers of 2, and three quarters of them
CHUNK = 8  # tokens decoded between two pieces of output; the slots for an answer are a multiple of it
LONG = 16  # evaluations; a token that takes more is a chunk by itself, so that others do not wait for a whole chunk
SAMPLES = (1, 2, 4, 8, 16, 128, 1024, 4096)  # numbers of noise samples for which programs are compiled
TOGETHER = 16  # noise samples integrated at once; more are integrated in groups of this size
PROGRAMS = 32  # compiled programs kept per function
# XLA's options by kind of device (compiled, not run): read more of the cache at once, and hoist what all layers share.
_OPTIONS = {"xla_tpu_scoped_vmem_limit_kib": "32768", "xla_tpu_licm_size_inflation_ratio": "1000"}
COMPILER_OPTIONS = dict.fromkeys(("TPU v5 lite", "TPU v5", "TPU v6 lite"), _OPTIONS)
_PAUSE: ContextVar[Callable[[], AbstractContextManager[None]] | None] = ContextVar("pause", default=None)


@contextlib.contextmanager
def pausing(pause: Callable[[], AbstractContextManager[None]] | None) -> Iterator[None]:
    """Within, `Programs` compile each new program under a context that `pause()` makes, before they run it.

    None: they compile without a pause, for changes of what several threads share.
    """
    token = _PAUSE.set(pause)
    try:
        yield
    finally:
        _PAUSE.reset(token)


class _Program:
    """A jitted function for one combination of argument shapes."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self._lock = threading.Lock()  # several threads may want the program at the same time; one of them compiles it
        self._compiled: set[Hashable] = set()  # places of arguments for which it is compiled

    def prepare(self, arguments: Any, named: dict[str, Any]) -> None:
        """Compile the program now, if it is new and a pause is set. While another function is traced, do nothing."""
        if (pause := _PAUSE.get()) is None:
            return
        leaves = jax.tree.leaves((arguments, named))
        arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
        if any(isinstance(leaf, jax.core.Tracer) for leaf in arrays):
            return
        places = tuple((array.sharding, array.committed) for array in arrays)
        if places not in self._compiled:
            with pause(), self._lock:
                if places not in self._compiled:
                    self.function.lower(*arguments, **named).compile()  # the call finds this program
                    self._compiled.add(places)


class Programs:
    """A function, compiled for each combination of argument shapes; only the latest `PROGRAMS` are kept.

    `jax.jit` alone keeps all programs until the process ends, so clients of a server could make memory grow forever.
    Several threads may call it.
    """

    def __init__(self, function: Callable[..., Any], *, static: Sequence[str] = (), **options: Any) -> None:
        """`static` are names of static keyword arguments; the other options are those of `jax.jit`."""
        functools.update_wrapper(self, function)
        self._function, self._static = function, tuple(static)
        self._options = {"static_argnames": self._static, **options}
        self._programs: OrderedDict[Hashable, _Program] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the function."""
        program = self._program(arguments, named)
        program.prepare(arguments, named)
        return program.function(*arguments, **named)

    def lower(self, *arguments: Any, **named: Any) -> Any:
        """Lower the function for these arguments, as `jax.jit(function).lower` does."""
        return self._program(arguments, named).function.lower(*arguments, **named)

    @property
    def count(self) -> int:
        """The number of programs that are kept."""
        return len(self._programs)

    def _program(self, arguments: Any, named: dict[str, Any]) -> _Program:
        static = tuple(named.get(name) for name in self._static)
        leaves, tree = jax.tree.flatten((arguments, {k: v for k, v in named.items() if k not in self._static}))
        key = static, tree, tuple(map(jax.typeof, leaves))
        with self._lock:
            program = self._programs.pop(key, None)
            if program is None:
                if len(self._programs) >= PROGRAMS:
                    self._programs.popitem(last=False)
                # Wrap the function anew each time: JAX shares the programs of several `jax.jit` of the same function.
                function = functools.update_wrapper(functools.partial(self._function), self._function)
                program = _Program(jax.jit(function, **self._options))
            self._programs[key] = program
        return program


def compiled(function: Callable[..., Any], *, static: tuple[str, ...], donate: str) -> Programs:
    """Compile a decoding function with the XLA options for the devices in use."""
    kind = (jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]).device_kind
    return _compiled(function, static, donate, kind)


@functools.cache
def _compiled(function: Callable[..., Any], static: tuple[str, ...], donate: str, kind: str) -> Programs:
    return Programs(function, static=static, donate_argnames=donate, compiler_options=COMPILER_OPTIONS.get(kind))


def sample_bucket(draws: int) -> int:
    """The smallest of `SAMPLES` that is at least `draws`."""
    return next(bucket for bucket in SAMPLES if bucket >= draws)


def is_long(budget: int, draws: int) -> bool:
    """Whether a token takes so many evaluations that it is decoded as a chunk by itself."""
    return budget * sample_bucket(draws) > LONG


def answer_slots(tokens: int) -> int:
    """The number of cache slots for an answer of at most `tokens`."""
    return -(-tokens // CHUNK) * CHUNK


def prompt_bucket(tokens: int) -> int:
    """The number of tokens to which a prompt is padded to be read, where requests arrive one at a time."""
    power = max(SHORTEST_SERVED, 1 << (tokens - 1).bit_length())
    between = 3 * power // 4  # for long prompts, to which each token attends
    return between if power > LANE_BUCKETS[-1] and tokens <= between else power


def lane_bucket(tokens: int) -> int:
    """The slots for the longest prompt, or the longest answer, of all lanes, where requests arrive one at a time."""
    return next((size for size in LANE_BUCKETS if size >= tokens), prompt_bucket(tokens))


def pad(
    prompts: Sequence[Sequence[int]], *, length: int | None = None, shortest: int = SHORTEST_BUCKET
) -> tuple[Int[jax.Array, "B P"], Int[jax.Array, " B"]]:
    """Pad prompts on the right to `length` (None: to a bucket) and put them on the mesh; also returns lengths."""
    length = length or round_up(max(map(len, prompts)), shortest=shortest)
    ids = np.zeros((len(prompts), length), np.int32)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    return sharding.spread(ids), sharding.spread(np.array([len(prompt) for prompt in prompts], np.int32))


def positions(lengths: Int[jax.Array, " B"], slots: Int[jax.Array, " P"], *, prefix: int = 0) -> Int[jax.Array, "B P"]:
    """The positions of slots of padded prompts that follow a prefix of `prefix` tokens; -1 for padding."""
    return jnp.where(slots < lengths[:, None], prefix + slots, -1)


def round_up(length: int, *, shortest: int = SHORTEST_BUCKET) -> int:
    """The smallest bucket of at least `length` tokens; at most a third of it is padding.

    The buckets are 32, 48, 64, 96, 128, 192 and so on. The first one is `shortest`, a power of two.
    """
    power = max(shortest, 1 << (length - 1).bit_length())
    between = 3 * power // 4
    return between if between > shortest and length <= between else power
