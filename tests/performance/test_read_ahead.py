"""Waiting for copies that run beside other work."""

import pytest

from l2d_jax.performance.hlo import HloProgram
from l2d_jax.performance.hlo_cost import program_cost
from tests.support.hlo_text import CYCLES

CHIP, MEMORY = "f32[100]{0:T(128)S(1)}", "f32[100]{0:T(128)}"  # 400 bytes
START = f"%s = ({CHIP}, {MEMORY}, u32[]{{:S(2)}}) copy-start(%x)"
DONE = f"%d = {CHIP} copy-done(%s)"


def waiting(*lines: str, others: str = "") -> float:
    """Cycles for which a program waits; its memory gives 4 bytes per cycle, and a copy takes 100."""
    entry = "\n".join(f"  {line}" for line in (f"%x = {MEMORY} parameter(0)", f"%y = {CHIP} negate(%x)", *lines))
    text = f"{others}ENTRY %main (x: {MEMORY}) -> {CHIP} {{\n{entry}\n  ROOT %r = {CHIP} negate(%y)\n}}\n"
    return program_cost(HloProgram.parse(text), rate=4.0).waiting


def work(cycles: int, operand: str = "%y", name: str = "w") -> str:
    return f"%{name} = {CHIP} negate({operand}), {CYCLES % cycles}"


@pytest.mark.parametrize(("cycles", "wanted"), [(0, 100), (30, 70), (100, 0), (500, 0)])
def test_a_copy_goes_on_while_others_compute(cycles: int, wanted: int) -> None:
    assert waiting(START, work(cycles), DONE) == wanted


def test_what_reads_memory_itself_leaves_the_copy_the_rest() -> None:
    assert waiting(START, work(130, "%x"), DONE) == 70  # 400 bytes take 100 of the 130 cycles


def test_copies_come_one_after_another() -> None:
    second = START.replace("%s", "%s2")
    assert waiting(START, second, DONE.replace("%s", "%s2")) == 200
    assert waiting(START, second, work(150), DONE, DONE.replace("%d", "%d2").replace("%s", "%s2")) == 50


def test_a_copy_of_a_slice() -> None:
    start = f"%s = (({MEMORY}), f32[40]{{0:T(128)S(1)}}, s32[]{{:S(2)}}) slice-start(%x), slice={{[0:40]}}"
    assert waiting(start, "%d = f32[40]{0:T(128)S(1)} slice-done(%s)") == 40


def test_a_fusion_reads_the_slices_that_it_takes() -> None:
    inner = f"""%inner (q: {MEMORY}) -> f32[20] {{
  %q = {MEMORY} parameter(0)
  %b = f32[10,10]{{1,0:T(8,128)}} bitcast(%q)
  %t = f32[2,10]{{1,0:T(8,128)}} dynamic-slice(%b)
  ROOT %o = f32[20] bitcast(%t)
}}
"""
    outer = f"""%outer (p: {MEMORY}) -> f32[20] {{
  %p = {MEMORY} parameter(0)
  ROOT %i = f32[20] fusion(%p), kind=kLoop, calls=%inner
}}
"""
    fusion = f"%w = {CHIP} fusion(%x), kind=kLoop, calls=%outer, {CYCLES % 100}"
    assert waiting(START, fusion, DONE, others=inner + outer) == 20  # 80 bytes of the slice take 20 cycles
