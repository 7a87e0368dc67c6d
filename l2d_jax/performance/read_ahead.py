"""How long a program waits for prefetched data: copies between memories, which overlap with other work.

The compiler's cycles do not include this. Here copies are simulated one after another, with the memory bandwidth that
the instructions between the start and the end of a copy leave unused.
"""

import dataclasses
import math
import re

from l2d_jax.performance.hlo import Computation, HloProgram, Instruction, bits, size_in_bytes

_ON_CHIP = re.compile(r"\b\w+\[[\d,]*\]\{[^}]*S\(\d+\)[^}]*\}")  # an array that is not in the device's main memory


class ReadAhead:
    """The copies in flight while the instructions of a program run one after another."""

    def __init__(self, program: HloProgram, rate: float) -> None:
        """`rate` is the memory bandwidth in bytes per cycle."""
        self._program, self._rate = program, rate
        self._left: dict[str, float] = {}  # remaining bytes, keyed by the name of the copy's start

    def wait(self, instruction: Instruction, computation: Computation) -> float:
        """The cycles for which an instruction waits for a copy. While other instructions run, copies continue."""
        if instruction.opcode in ("copy-start", "slice-start"):
            kind, sizes = instruction.arrays[1]
            self._left[instruction.name] = bits(kind) * math.prod(sizes) / 8
        elif instruction.opcode in ("copy-done", "slice-done"):
            names = list(self._left)
            wanted = names.index(start) + 1 if (start := instruction.operands[0]) in names else 0
            return sum(map(self._left.pop, names[:wanted])) / self._rate
        elif instruction.cycles and self._left:
            spare = instruction.cycles * self._rate - self._moved(instruction, computation)
            for name, left in list(self._left.items()):
                if spare > 0:
                    self._left[name] -= min(left, spare)
                    spare -= left
        return 0.0

    def _moved(self, instruction: Instruction, computation: Computation) -> int:
        """Bytes that an instruction reads from and writes to main memory."""
        moved = _off_chip(instruction)
        for number, name in enumerate(instruction.operands):
            size = _off_chip(computation[name])
            if size and instruction.opcode == "fusion":
                size = min(size, self._read(instruction.called[0], number, size))
            moved += size
        return moved

    def _read(self, name: str, number: int, size: int) -> int:
        """Bytes of a parameter of this size that a fused computation reads: slices, or all of it."""
        inside, read = self._program.computations[name], 0
        names = {i.name for i in inside.values() if i.opcode == "parameter" and int(i.literal) == number}
        for reader in inside.values():  # in order, so that a bitcast comes before what reads it
            for place in (place for place, operand in enumerate(reader.operands) if operand in names):
                if reader.opcode == "bitcast":
                    names.add(reader.name)
                elif reader.opcode == "fusion":
                    read += self._read(reader.called[0], place, size)
                else:
                    read += size_in_bytes(reader) if reader.opcode in ("dynamic-slice", "slice") else size
        return read


def _off_chip(instruction: Instruction) -> int:
    return size_in_bytes(dataclasses.replace(instruction, shape=_ON_CHIP.sub("", instruction.shape)))
