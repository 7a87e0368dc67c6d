"""The versions of what computes, the kind of card, and its rates of reading memory and of matrix products."""

import platform
from importlib import metadata

import jax

from l2d_jax.config.schema import MeshConfig
from l2d_jax.distributed.runtime import start_jax
from l2d_jax.performance.timing import PRODUCTS, matrix_products, medians, read_rate
from tests.device.options import Options
from tests.device.table import REFUSED, Rows

LIBRARIES = ("jax", "jaxlib", "flax", "transformers", "torch")


def version(name: str) -> str:
    """The version of a library, or that it is not there."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def run(rows: Rows, options: Options) -> None:
    """Write the versions, or that there is no GPU; then the rates."""
    try:
        device = jax.devices()[0]
        found = f"jax {jax.__version__} finds {device.platform} only"
    except RuntimeError as error:
        device, found = None, f"jax {jax.__version__} finds none: {str(error).splitlines()[0]}"
    if not options.rehearse and (device is None or device.platform != "gpu"):
        remedy = "install jax[cuda13] and check the driver, or give --rehearse"
        rows.add(REFUSED, f"this check needs a GPU, and {found}: {remedy}")
        return
    assert device is not None
    versions = {**{name: version(name) for name in LIBRARIES}, "python": platform.python_version()}
    for some in (LIBRARIES[:3], [*LIBRARIES[3:], "python"]):
        shown = {name: versions[name] for name in some}
        rows.add("versions", ", ".join(f"{name} {number}" for name, number in shown.items()), **shown)
    limit = (device.memory_stats() or {}).get("bytes_limit", 0) / 2**30
    memory = f", {limit:.0f} GiB for JAX" if limit else ""
    runtime = " ".join(device.client.platform_version.split())
    rows.add("device", f"{device.device_kind}{memory}", runtime, kind=device.device_kind, runtime=runtime, GiB=limit)
    mesh = start_jax(MeshConfig())
    with rows.guard("reading memory"):
        rate, method = read_rate(mesh)
        rows.add("reading memory", f"{rate / 1e9:,.0f} GB/s", f"the best of several programs: {method}", rate=rate)
    for dtype in ("bfloat16", "float32"):
        with rows.guard(f"matrix products, {dtype}"):
            size = 256 if options.rehearse else 8192
            multiply, operations = matrix_products(size, dtype=dtype)
            rate = operations / medians(multiply)[0]
            how = f"{PRODUCTS} products of {size} x {size} matrices, at JAX's default precision"
            rows.add(f"matrix products, {dtype}", f"{rate / 1e12:,.3g} TFLOP/s", how, rate=rate)
