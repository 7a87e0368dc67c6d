"""The TPU compiler's figures for a program: memory, FLOPs, collectives and time, as plain values or as a table."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from l2d_jax.performance.hlo import HloProgram
from l2d_jax.performance.hlo_cost import BETWEEN, Decided, InstructionCost, program_cost
from l2d_jax.performance.topologies import GIB, TpuGeneration

_UNITS = {"K": 2**10, "M": 2**20, "G": GIB, "T": 2**40}
_TOO_LARGE = (
    re.compile(r"Used ([\d.]+)([KMGT])i?B? of ([\d.]+)([KMGT])i?B? hbm"),
    re.compile(r"\(([\d.]+)([KMGT])\) exceeds available HBM \(([\d.]+)([KMGT])\)"),
)
_IN_PLACE = "outputs in place of arguments"
_SIZES = {  # fields of `memory_analysis`, without their ending
    "arguments": "argument",
    "outputs": "output",
    _IN_PLACE: "alias",
    "temporaries": "temp",
    "program": "generated_code",
}
_CROSSINGS = {"all-reduce": 2}  # how often each byte crosses a device's links; other kinds: once
# Phases of the time, by patterns in the names of traced operations; the first match counts.
_PHASES = {
    "recomputed for the backward pass": "rematted_computation",
    "pass over the context": r"\bllm\b",
    "LM and path together": "joint_pass",
    "path, backward": r"transpose\(jvp\(diffusion_path",
    "path, forward": "diffusion_path",
    "head and loss": r"jvp\(|/head/",
    "all else": "",
}
ATTENTION = 0.4  # assumed share of peak of attention kernels, because the compiler does not estimate kernels
_PARTS = 100  # number of most expensive instructions that are kept


def read_estimate(
    memory: Any, text: str, generation: TpuGeneration, *, useful: float, tokens: int, decided: Decided
) -> dict[str, Any]:
    """The figures of a compiled program, per device and execution; sizes in bytes.

    `memory` and `text` are the results of `Compiled.memory_analysis()` and `as_text()`. `useful` is the number of
    floating-point operations per device that the model needs, `tokens` the number of tokens of an execution on all
    devices, and `decided` says what is decided at run time.
    """
    cost = program_cost(HloProgram.parse(text), rate=generation.reading, decided=decided)
    sizes = {name: getattr(memory, f"{kind}_size_in_bytes") for name, kind in _SIZES.items()}
    kernels = cost.kernel_flops / (ATTENTION * generation.peak)
    seconds, waiting = generation.seconds(cost.cycles) + kernels, generation.seconds(cost.waiting)
    within = {kind: size for kind, size in cost.moved.items() if not kind.startswith(BETWEEN)}
    crossings = sum(_CROSSINGS.get(kind, 1) * size for kind, size in within.items())
    figures: dict[str, Any] = {name: dict(getattr(cost, name)) for name in ("moved", "calls", "kernels")}
    figures |= {"needed": sum(sizes.values()) - 2 * sizes[_IN_PLACE], "usable": generation.usable * GIB}
    figures |= {"useful FLOPs": useful, "FLOPs": cost.flops, "kernel FLOPs": cost.kernel_flops}
    figures |= {"peak": generation.peak, "FLOPs per cycle": generation.per_cycle, "cycles": cost.cycles}
    figures |= {"seconds": seconds, "seconds of kernels": kernels, "seconds of waiting": waiting}
    figures |= {"seconds on the links": crossings / generation.links}
    figures |= {"tokens per second": tokens / (seconds + waiting) if seconds else 0.0}
    figures |= {"loops of unknown length": cost.unknown_loops}
    figures |= {"share of peak": useful / (seconds * generation.peak) if seconds else 0.0}
    parts = [vars(part) for part in cost.parts[:_PARTS]]
    return sizes | figures | {"phases": _phases(cost.parts, generation), "parts": parts}


def _phases(parts: Iterable[InstructionCost], generation: TpuGeneration) -> dict[str, dict[str, float]]:
    """For each phase: seconds, seconds of instructions with matrix products, and the FLOPs of these products."""
    phases = {name: {"seconds": 0.0, "seconds of products": 0.0, "FLOPs": 0.0} for name in _PHASES}
    for part in parts:
        name = next(name for name, pattern in _PHASES.items() if re.search(pattern, part.source))
        phase, seconds = phases[name], generation.seconds(part.cycles)
        phase["seconds"] += seconds
        phase["seconds of products"] += seconds if part.flops else 0
        phase["FLOPs"] += part.flops
    return phases


def too_large(message: str) -> dict[str, Any] | None:
    """The figures in the compiler's message that a program is too large; None for other messages."""
    for pattern in _TOO_LARGE:
        if found := pattern.search(message):
            needed, usable = (float(found[i]) * _UNITS[found[i + 1]] for i in (1, 3))
            return {"needed": needed, "usable": usable}
    return None


def fits(figures: Mapping[str, Any]) -> bool:
    """Whether the program fits into the memory of a device."""
    return bool(figures["needed"] <= figures["usable"])


def estimate_lines(figures: Mapping[str, Any], *, top: int = 0) -> list[str]:
    """The lines of a table; `top` adds a list of this number of most expensive instructions."""
    needed, usable = figures["needed"], figures["usable"]
    spare = f"{_size(abs(usable - needed))} ({abs(1 - needed / usable):.0%})"
    rows = [(f"memory: {name}", _size(figures[name])) for name in (*_SIZES, "needed", "usable") if name in figures]
    rows.append(("memory", f"fits, {spare} to spare" if fits(figures) else f"does not fit: {spare} too much"))
    if "evaluations" in figures:
        rows.append(("evaluations of a token", figures["evaluations"]))
    if "cycles" in figures:
        executed, useful, seconds = figures["FLOPs"], figures["useful FLOPs"], figures["seconds"]
        rows.append(("FLOPs: useful", f"{useful:.4g}"))
        rows.append(("FLOPs: compiled matrix products", f"{executed:.4g}, {executed / useful:.2f} of the useful"))
        for kind, size in sorted(figures["moved"].items(), key=lambda item: -item[1]):
            rows.append((f"collectives: {kind}", f"{_size(size)} in {figures['calls'][kind]:,} calls"))
        rows += [(f"kernel: {name}", f"{count:,} runs") for name, count in figures["kernels"].items()]
        if figures["kernels"]:
            taken = f"{figures['seconds of kernels']:.4g} s, taken at {ATTENTION:.0%} of peak"
            rows.append(("time of kernels of attention", taken))
        rows += [_phase(name, phase, figures) for name, phase in figures["phases"].items() if phase["seconds"]]
        rows += [
            ("time on the links of a slice, at least", f"{figures['seconds on the links']:.4g} s"),
            ("time of computing, the compiler's estimate", f"{seconds:.4g} s ({figures['cycles']:.4g} cycles)"),
            ("time of waiting for what is read ahead", f"{figures['seconds of waiting']:.4g} s"),
            ("tokens per second of all devices, by both", f"{figures['tokens per second']:,.0f}"),
            ("useful FLOPs as a share of peak", f"{figures['share of peak']:.1%}"),
        ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    if top and "parts" in figures:
        lines += ["", "  share   runs  of peak  instruction: operation"]
        lines += [_part(part, figures) for part in figures["parts"][:top]]
    return lines


def _size(size: int | float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 100 else f"{size / 2**20:.2f} MiB"


def _phase(name: str, phase: Mapping[str, float], figures: Mapping[str, Any]) -> tuple[str, str]:
    text = f"{phase['seconds'] / figures['seconds']:.1%}"
    if phase["FLOPs"]:
        products = phase["seconds of products"]
        busy = phase["FLOPs"] / products / figures["peak"]
        text += f", of which products {products / figures['seconds']:.1%}, at {busy:.0%} of peak"
    return f"time: {name}", text


def _part(part: Mapping[str, Any], figures: Mapping[str, Any]) -> str:
    busy = f"{part['flops'] / part['cycles'] / figures['FLOPs per cycle']:6.0%}" if part["flops"] else "     -"
    share = part["cycles"] / figures["cycles"]
    return f"{share:7.1%} {part['times']:>6}   {busy}  {part['name']}: {part['source'][-90:]}"
