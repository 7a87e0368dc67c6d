"""TPU slices by name, for compiling without a TPU: libtpu can describe their devices on any machine.

Figures are per device, which is a chip, except on tpu7x, where it is one of a chip's two cores. `peak`, `memory` and
`links` come from the manufacturer's tables of system architecture; `usable` comes from the compiler's message about a
program that is too large. The compiler estimates cycles. They are converted to seconds with the clock at which all
matrix units together reach the published peak: 1.5 GHz on v5e, 1.75 on v5p and v6e, 1.05 on v4, 2.2 on tpu7x. The
compiler's estimate for a large product is within 3 to 19 % of that.
"""

import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.experimental import topologies

from l2d_jax.config.parsing import nearest
from l2d_jax.errors import InputError, require
from l2d_jax.files import package_table

GIB = 2**30
TABLE = package_table("performance/topologies.toml")


@dataclass(frozen=True)
class TpuGeneration:
    """A kind of TPU."""

    axes: int  # number of axes of a slice's shape
    peak: float  # dense bfloat16 operations per second of a device
    units: int  # matrix units of a device
    side: int  # side of a matrix unit, which is square
    usable: float  # GiB of a device's memory that a program may use
    memory: float  # memory bandwidth, bytes per second
    links: float  # bytes per second into a device, over all its links
    options: Mapping[str, Any] = field(default_factory=dict)  # further arguments for describing its slices

    @property
    def per_cycle(self) -> int:
        """Operations per clock cycle: a multiplication and an addition in each cell of the matrix units."""
        return 2 * self.units * self.side**2

    @property
    def reading(self) -> float:
        """Memory bytes per cycle, at three quarters of the published rate, which the compiler assumes for a v5e."""
        return 0.75 * self.memory * self.per_cycle / self.peak

    def seconds(self, cycles: int | float) -> float:
        """Convert cycles to seconds."""
        return cycles * self.per_cycle / self.peak


GENERATIONS = {name: TpuGeneration(**facts) for name, facts in TABLE["generations"].items()}


@dataclass(frozen=True)
class Topology:
    """One or several equal slices."""

    kind: str
    shape: tuple[int, ...]  # chips
    slices: int = 1

    @classmethod
    def parse(cls, text: str, *, slices: int = 1) -> "Topology":
        """Parse a name such as `v5e:16x16`; raises `InputError` for any other form."""
        kind, _, layout = text.partition(":")
        require(kind in GENERATIONS, f"unknown kind of TPU {kind!r}{nearest(kind, GENERATIONS)}")
        axes = GENERATIONS[kind].axes
        if not re.fullmatch(r"[1-9]\d{0,3}(x[1-9]\d{0,3})*", layout) or layout.count("x") != axes - 1:
            example = "x".join(["4"] * axes)
            raise InputError(f"a slice of {kind} has {axes} sizes, got {text!r}: write it as {kind}:{example}")
        require(slices >= 1, f"--slices must be at least 1, got {slices}")
        return cls(kind, tuple(map(int, layout.split("x"))), slices)

    @property
    def name(self) -> str:
        """The name that `parse` reads; if there are several slices, their number comes first."""
        text = f"{self.kind}:{'x'.join(map(str, self.shape))}"
        return text if self.slices == 1 else f"{self.slices} x {text}"

    def devices(self) -> list[jax.Device]:
        """Descriptions of the devices; raises `InputError` without libtpu, and for a slice that does not exist."""
        if importlib.util.find_spec("libtpu") is None:
            raise InputError("compiling for a TPU needs libtpu, which is not installed: pip install '.[tpu]'")
        for name, value in TABLE["environment"].items():
            os.environ.setdefault(name, value)
        options = {**GENERATIONS[self.kind].options, **({"num_slices": self.slices} if self.slices > 1 else {})}
        host = [*(min(size, 2) for size in self.shape[:2]), 1]
        try:
            name = self.name.rpartition(" ")[2]
            described = topologies.get_topology_desc(name, platform="tpu", chips_per_host_bounds=host, **options)
        except (RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise InputError(f"there is no slice {self.name} ({reason}): choose another --topology") from None
        return list(described.devices)
