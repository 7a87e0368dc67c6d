"""The reader of optimized programs, on snippets of what the TPU's compiler writes and on a program of this machine."""

import jax
import jax.numpy as jnp
import pytest

from l2d_jax.performance.hlo import HloProgram, size_in_bytes

KERNEL = """HloModule jit_f, is_scheduled=true

%body (state: (s32[], bf16[8,128])) -> (s32[], bf16[8,128]) {
  %state = (s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)S(1)}) parameter(0)
  %x = bf16[8,128]{1,0:T(8,128)(2,1)} get-tuple-element(%state), index=1
  %kernel.1 = bf16[8,128]{1,0:T(8,128)(2,1)} custom-call(%x), custom_call_target="tpu_custom_call", kernel_metadata={
"note":"{\\"block\\": 128}"
}}, metadata={op_name="jit(f)/pallas_call"}
  %add.1 = bf16[8,128]{1,0:T(8,128)(2,1)} add(%kernel.1, %x), metadata={op_name="jit(f)/add"}, \
backend_config={"window_config":{"estimated_cycles":"63296"}}
  %i = s32[]{:T(128)} get-tuple-element(%state), index=0
  %one = s32[]{:T(128)} constant(STEP)
  %next = s32[]{:T(128)} add(%i, %one)
  ROOT %out = (s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)}) tuple(%next, %add.1)
}

%condition (state.1: (s32[], bf16[8,128])) -> pred[] {
  %five = s32[]{:T(128)} constant(5)
  %state.1 = (s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)S(1)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i.1, %five), direction=LT
}

ENTRY %main (x: bf16[8,128]) -> bf16[8,128] {
  %x.1 = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
  %first = s32[]{:T(128)} constant(FIRST)
  %tuple = (s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)}) tuple(%first, %x.1)
  %loop = (s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)}) while(%tuple), condition=%condition, body=%body
  ROOT %y = bf16[8,128]{1,0:T(8,128)(2,1)} get-tuple-element(%loop), index=1
}
"""


def loop(text: str = KERNEL, *, first: str = "0", step: str = "1") -> HloProgram:
    return HloProgram.parse(text.replace("FIRST", first).replace("STEP", step))


def trips(program: HloProgram) -> int | None:
    entry = program.computations[program.entry]
    return program.trips(entry["loop"], entry)


def test_lines_that_a_kernel_broke_do_not_end_a_computation():
    program = loop()
    assert program.entry == "main"
    assert list(program.computations) == ["body", "condition", "main"]
    body = program.computations["body"]
    assert list(body) == ["state", "x", "kernel.1", "add.1", "i", "one", "next", "out"]
    assert body["kernel.1"].opcode == "custom-call"
    assert body["kernel.1"].source == "jit(f)/pallas_call"
    assert body["add.1"].operands == ("kernel.1", "x")
    assert (body["add.1"].cycles, body["x"].cycles) == (63296, 0)
    assert body["out"].is_root
    assert not body["add.1"].is_root


def test_sizes():
    body = loop().computations["body"]
    assert body["state"].arrays == [("s32", ()), ("bf16", (8, 128))]
    assert size_in_bytes(body["x"]) == 2 * 8 * 128
    assert size_in_bytes(body["state"]) == 4 + 2 * 8 * 128


@pytest.mark.parametrize(("first", "step", "wanted"), [("0", "1", 5), ("2", "1", 3), ("0", "2", 3), ("7", "1", 0)])
def test_trips(first, step, wanted):
    assert trips(loop(first=first, step=step)) == wanted


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("direction=LT", "direction=GT"),
        ("%five = s32[]{:T(128)} constant(5)", "%five = s32[]{:T(128)} get-tuple-element(%state.1), index=1"),
        ("add(%i, %one)", "multiply(%i, %one)"),
        ("constant(STEP)", "get-tuple-element(%state), index=1"),
    ],
)
def test_a_length_that_only_the_program_knows(old, new):
    assert old in KERNEL
    assert trips(loop(KERNEL.replace(old, new))) is None


def test_a_comparison_in_a_fusion():
    inside = """%compared (p.0: s32[], p.1: s32[]) -> pred[] {
  %p.0 = s32[]{:T(128)} parameter(0)
  %p.1 = s32[]{:T(128)} parameter(1)
  ROOT %lt.1 = pred[]{:T(512)} compare(%p.1, %p.0), direction=LT
}

%condition"""
    line = "  ROOT %lt = pred[]{:T(512)} compare(%i.1, %five), direction=LT"
    fused = "  ROOT %lt = pred[]{:T(512)} fusion(%five, %i.1), kind=kLoop, calls=%compared"
    assert trips(loop(KERNEL.replace("%condition", inside, 1).replace(line, fused))) == 5


def convolution(shapes: str, attributes: str) -> int:
    left, right, out = shapes.split()
    program = HloProgram.parse(
        f"ENTRY %main (a: {left}, b: {right}) -> {out} {{\n  %a = {left} parameter(0)\n  %b = {right} parameter(1)\n"
        f"  ROOT %c = {out} convolution(%a, %b), {attributes}\n}}\n"
    )
    entry = program.computations["main"]
    return program.flops(entry["c"], entry)


@pytest.mark.parametrize(
    ("shapes", "attributes", "wanted"),
    [
        # A matrix product, [6, 5] x [5, 7].
        ("bf16[6,5] bf16[5,7] f32[6,7]", "dim_labels=bf_io->bf", 2 * 6 * 5 * 7),
        # Two summed axes, [6, 3, 5] x [3, 5, 7].
        ("bf16[3,6,5] bf16[3,5,7] f32[1,6,7]", "window={size=3}, dim_labels=0bf_0io->0bf", 2 * 6 * 15 * 7),
        # An outer product over a window that is turned round: each of 4 places of the right meets each of the left.
        (
            "bf16[6,3,5] bf16[4,5,7] f32[6,7,6]",
            "window={size=4 pad=3_3 rhs_reversal=1}, dim_labels=b0f_0io->bf0",
            2 * 6 * 5 * 7 * 3 * 4,
        ),
        # A batch axis of 4: window, stride and dilation meet at one place each.
        (
            "bf16[4,6,5] bf16[4,5,7] f32[4,6,7]",
            "window={size=4 stride=3 lhs_dilate=4}, dim_labels=0bf_0io->0bf",
            2 * 4 * 6 * 5 * 7,
        ),
        ("f32[6,8] f32[2,12] f32[6,12]", "feature_group_count=4, dim_labels=bf_io->bf", 2 * 6 * 2 * 12),
    ],
)
def test_products_as_convolutions(shapes, attributes, wanted):
    assert convolution(shapes, attributes) == wanted


def test_a_program_of_this_machine():
    def forward(x, weights):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0].sum()

    compiled = jax.jit(forward).lower(jnp.ones((16, 32)), jnp.ones((7, 32, 32))).compile()
    program = HloProgram.parse(compiled.as_text() or "")
    loops = [(i, c) for c in program.computations.values() for i in c.values() if i.opcode == "while"]
    assert [program.trips(*found) for found in loops] == [7]
    products = [program.flops(i, c) for c in program.computations.values() for i in c.values() if i.opcode == "dot"]
    assert products == [2 * 16 * 32 * 32]
