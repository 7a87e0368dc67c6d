"""Reads the text of an optimized XLA program: its computations, how often each runs, and what an instruction costs.

The text for a TPU does not say how often a loop runs. That follows from the loop's condition, `counter < constant`, and
from what its body adds to the counter. Lines within the attributes of a Pallas kernel may begin with a brace, so only a
line with nothing but a closing brace ends a computation.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

_LINES = re.compile(r"\n(?=  %|  ROOT |%|ENTRY |\}?(?:\n|\Z))")  # other line breaks are within an attribute
_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_NAMED = re.compile(r"  (ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r" ([a-z][\w\-]*)\(")
_OPERAND = re.compile(r"%([\w.\-]+)")
_COPIES = ("copy", "copy-start", "copy-done", "bitcast", "broadcast", "opt-barrier")
_ARRAY = re.compile(r"\b(pred|token|[a-z]+\d+\w*)\[([\d,<=]*)\]")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)")


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    shape: str  # of the result, with its layout
    operands: tuple[str, ...]  # names
    literal: str  # the text between the parentheses: a constant's value, a parameter's number
    attributes: str
    is_root: bool

    @cached_property
    def arrays(self) -> list[tuple[str, tuple[int, ...]]]:
        """Element type and dimensions of the result, or of each element of a tuple."""
        found = ((kind, sizes.replace("<=", "").split(",")) for kind, sizes in _ARRAY.findall(self.shape))
        return [(kind, tuple(int(size) for size in sizes if size)) for kind, sizes in found]

    @property
    def dimensions(self) -> tuple[int, ...]:
        """Dimensions of the result, or of the first element of a tuple."""
        return self.arrays[0][1] if self.arrays else ()

    def find(self, pattern: str) -> str | None:
        """The group of a regular expression at its first match in the attributes."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else None

    @property
    def cycles(self) -> int:
        """The compiler's estimate for one execution; 0 if it made none (waiting, copies between memories)."""
        return int(self.find(r'"estimated_cycles":"(\d+)"') or 0)

    @property
    def called(self) -> list[str]:
        """The computations that it runs, except branches of a conditional and the condition of a loop."""
        return _CALLED.findall(self.attributes)

    @property
    def branches(self) -> list[str]:
        """The branches of a conditional."""
        listed = self.find(r"\bbranch_computations=\{([^}]*)\}")
        return self.called if listed is None else _OPERAND.findall(listed)

    @property
    def source(self) -> str:
        """The operation of the traced program from which the compiler made it."""
        return self.find(r'\bop_name="([^"]*)"') or ""


Computation = Mapping[str, Instruction]


@dataclass(frozen=True)
class HloProgram:
    """The computations of an optimized program by name."""

    computations: dict[str, dict[str, Instruction]]
    entry: str

    @classmethod
    def parse(cls, text: str) -> "HloProgram":
        """Read the text that `Compiled.as_text()` returns."""
        computations: dict[str, dict[str, Instruction]] = {}
        entry, current = "", None
        for broken in _LINES.split(text):
            line = broken.replace("\n", "")
            if head := _HEAD.match(line):
                current = computations.setdefault(head[2], {})
                entry = head[2] if head[1] else entry
            elif line == "}":
                current = None
            elif current is not None and (found := _NAMED.match(line)):
                current[found[2]] = _instruction(found[2], line[found.end() - 1 :], is_root=bool(found[1]))
        return cls(computations, entry)

    def trips(self, loop: Instruction, caller: Computation) -> int | None:
        """How often a loop's body runs; None if it is decided at run time."""
        if known := loop.find(r'"known_trip_count":\{"n":"(\d+)"'):
            return int(known)
        condition = loop.find(r"\bcondition=%?([\w.\-]+)")
        assert condition is not None, loop.name
        inside = self.computations[condition]
        root = _root(inside)
        sides = [inside[name] for name in root.operands]
        if root.opcode == "fusion":  # the comparison is in a fusion: replace its parameters by the operands outside
            fused = self.computations[root.called[0]]
            root = _root(fused)
            compared = [fused[name] for name in root.operands]
            sides = [sides[int(side.literal)] if side.opcode == "parameter" else side for side in compared]
        if root.opcode != "compare" or "direction=LT" not in root.attributes:
            return None
        counter, limit = sides
        if counter.opcode != "get-tuple-element" or limit.opcode != "constant":
            return None
        body, index = self.computations[loop.called[0]], _index(counter)
        step, next_step = (_value(body, _root(body).name, index, counter=count) for count in (0, 1))
        if not step or next_step != step + 1:  # the body does more than add to the counter
            return None
        first = _value(caller, loop.operands[0], index) or 0
        return max(0, -(-(int(limit.literal) - first) // step))

    def flops(self, instruction: Instruction, computation: Computation) -> int:
        """Floating-point operations of the matrix products in one execution of an instruction."""
        if instruction.opcode == "fusion":
            inside = self.computations[instruction.called[0]]
            return sum(self.flops(i, inside) for i in inside.values())
        if instruction.opcode == "convolution":
            return _convolution(instruction, computation)
        if instruction.opcode == "dot":
            contracted = instruction.find(r"\blhs_contracting_dims=\{([\d,]*)\}") or ""
            sizes = computation[instruction.operands[0]].dimensions
            return 2 * math.prod(instruction.dimensions) * math.prod(sizes[int(i)] for i in contracted.split(",") if i)
        return 0


def size_in_bytes(instruction: Instruction) -> int:
    """Bytes of the result without padding; for the start of an asynchronous operation, its largest element."""
    sizes = [bits(kind) * math.prod(sizes) // 8 for kind, sizes in instruction.arrays]
    return max(sizes, default=0) if instruction.opcode.endswith("-start") else sum(sizes)


def _instruction(name: str, rest: str, *, is_root: bool) -> Instruction:
    found = _OPCODE.search(rest)
    assert found is not None, rest[:200]
    depth, end = 1, found.end()
    for end in range(found.end(), len(rest)):
        depth += {"(": 1, ")": -1}.get(rest[end], 0)
        if depth == 0:
            break
    inside, shape = rest[found.end() : end], rest[: found.start()]
    return Instruction(name, found[1], shape, tuple(_OPERAND.findall(inside)), inside, rest[end + 1 :], is_root)


def _root(computation: Computation) -> Instruction:
    return next(i for i in computation.values() if i.is_root)


def _index(instruction: Instruction) -> int:
    return int(instruction.attributes.partition("index=")[2].partition(",")[0])


def _value(computation: Computation, name: str, index: int, *, counter: int | None = None) -> int | None:
    """The integer value of an instruction, or of element `index` of a tuple, if the loop's counter is `counter`.

    None: unknown.
    """
    found = computation.get(name)
    while found is not None and found.opcode in _COPIES:
        found = computation.get(found.operands[0])
    if found is None:
        return None
    if found.opcode == "tuple":
        return _value(computation, found.operands[index], index, counter=counter)
    if found.opcode == "get-tuple-element":
        return counter if _index(found) == index else None
    if found.opcode == "add":
        one, other = (_value(computation, operand, index, counter=counter) for operand in found.operands)
        return None if one is None or other is None else one + other
    return int(found.literal) if found.opcode == "constant" and found.literal.isdigit() else None


def bits(kind: str) -> int:
    """The size of an element in bits, by the name of its type."""
    found = re.search(r"\d+", kind)
    return int(found[0]) if found else {"token": 0, "pred": 8}[kind]


def _convolution(instruction: Instruction, computation: Computation) -> int:
    """Twice the number of multiplications of a convolution. XLA also writes matrix products as convolutions.

    In those, batch axes become spatial axes, whose windows are mostly in the padding.
    """
    labels = re.search(r"\bdim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    assert labels is not None, instruction.name
    shapes = (computation[name].dimensions for name in instruction.operands)
    left, right = (dict(zip(labels[i], shape, strict=True)) for i, shape in enumerate(shapes, 1))
    out = dict(zip(labels[3], instruction.dimensions, strict=True))
    batches = int(instruction.find(r"\bbatch_group_count=(\d+)") or 1)
    window = dict(re.findall(r"(\w+)=([\w\-]+)", instruction.attributes.partition("window={")[2].partition("}")[0]))
    count = right["i"] * right["o"] * left["b"] // batches
    for axis in (label for label in labels[3] if label.isdigit()):

        def read(key: str, default: str, place: int = int(axis)) -> str:
            return window.get(key, "x".join([default] * (place + 1))).split("x")[place]

        low = int(read("pad", "0_0").split("_")[0])
        out_at = np.arange(out[axis])[:, None] * int(read("stride", "1"))
        at = out_at + np.arange(int(read("size", "1"))) * int(read("rhs_dilate", "1")) - low
        dilation = int(read("lhs_dilate", "1"))
        count *= int(((at >= 0) & (at <= (left[axis] - 1) * dilation) & (at % dilation == 0)).sum())
    return 2 * count
