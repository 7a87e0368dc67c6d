"""Matrix products of few rows that read weights in place, by `few_rows.c`: float32, on a single CPU device.

XLA's products read a matrix at half the rate of the memory, and a scan first copies each layer's slice of a stack. The
extra `cpu` installs a C compiler; each process compiles `few_rows.c` for its machine, in a second.
"""

import ctypes
import math
import os
import subprocess
import sys
import threading
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from l2d_jax.errors import shorten
from l2d_jax.storage.partial import scratch_folder

ROWS = 128  # largest number of rows: for more, XLA's products are good
UNIT = 32  # inputs and outputs of a matrix must be multiples of it

_library: list[ctypes.CDLL | None] = []  # None: compilation failed
_lock = threading.Lock()


class StackedWeight(NamedTuple):
    """The matrix of one layer within the stack of all layers."""

    stack: Float[Array, "L ..."]  # [L, *inputs, *outputs]
    layer: Int[Array, ""]


def can_read(weight: Array) -> bool:
    """Whether these products can read a model with this weight. Compiles on the first call, or warns why it cannot."""
    platforms = [device.platform for device in weight.devices()]
    if platforms != ["cpu"] or weight.dtype != jnp.float32 or find_spec("ziglang") is None:
        return False
    with _lock:
        if not _library:
            _library.append(_compile())
    return _library[0] is not None


def takes(matrix: Array, inputs: int) -> bool:
    """Whether these products can read a matrix whose first `inputs` axes are its inputs."""
    return not any(math.prod(sizes) % UNIT for sizes in (matrix.shape[:inputs], matrix.shape[inputs:]))


def few_rows_product(x: Array, weight: StackedWeight, dims: int) -> Array:
    """`x @ weight` over the last `dims` axes of x; XLA computes it if there are more than `ROWS` rows."""
    inputs, outputs = weight.stack.shape[1 : 1 + dims], weight.stack.shape[1 + dims :]
    rows, stack = x.reshape(-1, math.prod(inputs)), weight.stack.reshape(-1, math.prod(inputs), math.prod(outputs))
    few = len(rows) <= ROWS
    y = _call("product", rows, stack, weight.layer, stack.shape[2]) if few else rows @ stack[weight.layer]
    return y.reshape(*x.shape[: x.ndim - dims], *outputs)


def few_rows_logits(x: Float[Array, "*B D"], head: Float[Array, "V D"]) -> Float[Array, "*B V"]:
    """`x @ head.T`."""
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) > ROWS or not takes(head, 1):
        return jnp.einsum("...D,VD->...V", x, head)
    return _call("transposed_product", rows, head, jnp.int32(0), len(head)).reshape(*x.shape[:-1], -1)


def _call(name: str, rows: Array, stack: Array, layer: Array, outputs: int) -> Array:
    results = [jax.ShapeDtypeStruct((len(rows), outputs), jnp.float32), jax.ShapeDtypeStruct((32,), jnp.int32)]
    return jax.ffi.ffi_call(f"l2d_{name}", results, vmap_method="expand_dims")(rows, stack, layer)[0]


def _compile() -> ctypes.CDLL | None:
    with scratch_folder() as folder:
        made, source = folder / "few_rows.so", Path(__file__).with_suffix(".c")
        options = ["-O2", "-mcpu=native", "-shared", "-fPIC", "-nostdlib", f"-I{jax.ffi.include_dir()}"]
        caches = dict.fromkeys(("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"), str(folder))
        command = [sys.executable, "-m", "ziglang", "cc", *options, str(source), "-o", str(made)]
        done = subprocess.run(command, env=os.environ | caches, capture_output=True, text=True, check=False)
        if done.returncode:
            problem = f"ziglang cannot compile {source.name}: decoding goes on with XLA's slower products"
            warnings.warn(f"{problem} ({shorten(done.stderr, 200)})", stacklevel=2)
            return None
        library = ctypes.CDLL(str(made))
    for name in ("product", "transposed_product"):
        jax.ffi.register_ffi_target(f"l2d_{name}", jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    return library
