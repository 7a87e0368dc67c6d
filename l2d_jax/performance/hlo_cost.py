"""The cost of one execution of an optimized XLA program on a device: cycles, FLOPs and bytes of collectives."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from l2d_jax.performance.hlo import Computation, HloProgram, Instruction, size_in_bytes
from l2d_jax.performance.read_ahead import ReadAhead

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
Execution = tuple[Instruction, str, int]  # an instruction outside fusions, its computation, number of runs
BETWEEN = "between slices, "  # prefix for kinds of collectives that leave the slice


@dataclass(frozen=True)
class InstructionCost:
    """The cost of one instruction over all its runs."""

    cycles: int
    times: int
    flops: int
    name: str
    source: str  # the operation of the traced program


@dataclass
class ProgramCost:
    """The cost of one execution of the program on one device."""

    cycles: int = 0
    waiting: float = 0.0  # cycles of waiting for prefetched copies
    flops: int = 0  # executed matrix products, with recomputation, without kernels
    moved: Counter[str] = field(default_factory=Counter)  # bytes by kind of collective
    calls: Counter[str] = field(default_factory=Counter)  # number of collectives by kind
    kernels: Counter[str] = field(default_factory=Counter)  # runs of hand-written kernels, which have no estimate
    kernel_flops: int = 0  # FLOPs of the attention kernels
    unknown_loops: int = 0
    parts: list[InstructionCost] = field(default_factory=list)  # most cycles first


@dataclass(frozen=True)
class Decided:
    """What is decided at run time."""

    trips: int = 1  # assumed number of runs of loops whose length is unknown, such as an adaptive solver's
    skipped: tuple[str, ...] = ()  # named scopes whose conditionals take their cheapest branch; others: the costliest


def program_cost(program: HloProgram, *, rate: float = math.inf, decided: Decided = Decided()) -> ProgramCost:
    """Sum the costs of all instructions that run; `rate` is the memory bandwidth in bytes per cycle."""
    cost, ahead = ProgramCost(), ReadAhead(program, rate)
    counted: set[tuple[str, str]] = set()
    for instruction, name, times in _executions(program, program.entry, 1, decided):
        if instruction.opcode == "while":
            cost.unknown_loops += 1
            continue
        computation, cycles = program.computations[name], times * instruction.cycles
        if instruction.opcode == "custom-call" and '"tpu_custom_call"' in instruction.attributes:
            cost.kernels[instruction.name.rpartition(".")[0] or instruction.name] += times
            cost.kernel_flops += times * _attention(instruction, computation)
        flops = times * program.flops(instruction, computation)
        cost.cycles += cycles
        cost.waiting += times * ahead.wait(instruction, computation)
        cost.flops += flops
        if cycles:
            cost.parts.append(InstructionCost(cycles, times, flops, instruction.name, instruction.source))
        for kind, key, size in _collectives(program, name, instruction):
            if (name, key) not in counted:
                counted.add((name, key))
                cost.moved[kind] += times * size
                cost.calls[kind] += times
    cost.parts.sort(key=lambda part: -part.cycles)
    return cost


def _executions(program: HloProgram, name: str, times: int, decided: Decided) -> list[Execution]:
    """All instructions that run if a computation runs `times` times, including loops of unknown length."""
    found: list[Execution] = []
    computation = program.computations[name]
    for instruction in computation.values():
        if instruction.opcode == "while":
            trips = program.trips(instruction, computation)
            if trips is None:
                found.append((instruction, name, times))
            runs = times * (decided.trips if trips is None else trips)
            found += _executions(program, instruction.called[0], runs, decided)
        elif instruction.opcode == "conditional":
            branches = [_executions(program, branch, times, decided) for branch in instruction.branches]
            choose = min if {*decided.skipped} & {*instruction.source.split("/")} else max
            found += choose(branches, key=lambda branch: sum(runs * one.cycles for one, _, runs in branch))
        elif instruction.opcode in ("call", "async-start"):
            found += _executions(program, instruction.called[0], times, decided)
        else:
            found.append((instruction, name, times))
    return found


def _attention(instruction: Instruction, computation: Computation) -> int:
    """Floating-point operations of a causal attention kernel, from its name and shapes; 0 for other kernels.

    The forward pass has two products of queries x keys x width, the gradient of queries three, and the gradient of keys
    and values four. A fused backward pass has five.
    """
    if not re.search("splash|flash|attention", instruction.name):
        return 0
    operands = [computation[name] for name in instruction.operands]
    query, key = [i.dimensions for i in operands if i.arrays[0][0] in ("bf16", "f32") and len(i.dimensions) > 1][:2]
    products = 2
    if "dq" in instruction.name:
        products = 3
    elif "dkv" in instruction.name:
        products = 5 if re.search(r"use_fused_bwd_kernel\W+true", instruction.attributes) else 4
    causal = 2 if query[-2] == key[-2] else 1
    return products * 2 * math.prod(query) * key[-2] // causal


def _collectives(program: HloProgram, name: str, instruction: Instruction) -> Iterator[tuple[str, str, int]]:
    """Kind, identity and bytes of each collective of an instruction.

    The bytes are those of the whole array that is gathered or reduced. Between slices, where parts leave through the
    host, they are the bytes sent.
    """
    computation = program.computations[name]
    kind = instruction.opcode.removesuffix("-start")
    if instruction.opcode == "fusion":
        inner = instruction.called[0]
        for inside in program.computations[inner].values():
            for found, key, size in _collectives(program, inner, inside):
                if found == "all-reduce" and inner.startswith("all-reduce-scatter"):
                    yield "reduce-scatter", instruction.name, size
                else:  # overlapped with other work, it is split into fusions that share a channel: count it once
                    yield found, inside.find(r"\bchannel_id=(\d+)") or key, size
    elif kind in KINDS:
        inputs = sum(size_in_bytes(computation[operand]) for operand in instruction.operands)
        output = size_in_bytes(instruction)
        yield kind, instruction.name, max(inputs, output)
    elif kind == "send" and (between := instruction.find(r'\b_xla_megascale_transfer_type="(\w+)"')):
        sent = size_in_bytes(computation[instruction.operands[0]])
        yield f"{BETWEEN}{between.lower().replace('_', '-')}", instruction.name, sent
