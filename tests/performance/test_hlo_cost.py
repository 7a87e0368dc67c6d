"""Costs of whole programs: loops, branches, fusions, collectives and kernels."""

import pytest

from l2d_jax.performance.hlo import HloProgram
from l2d_jax.performance.hlo_cost import Decided, ProgramCost, program_cost
from tests.support.hlo_text import CYCLES, PRODUCT, SHAPE, computation


def program(entry: str, *others: str) -> HloProgram:
    lines = "\n".join(f"  {line.strip()}" for line in entry.strip().splitlines())
    return HloProgram.parse("\n".join([*others, f"ENTRY %main (x: {SHAPE}) -> {SHAPE} {{", lines, "}", ""]))


def only(entry: str, *others: str) -> ProgramCost:
    return program_cost(program(f"%x = {SHAPE} parameter(0)\n{entry}", *others))


def test_a_fusion_counts_its_products_and_its_own_estimate():
    cost = only(f"ROOT %f = {SHAPE} fusion(%x), kind=kOutput, calls=%product, {CYCLES % 7}", PRODUCT)
    assert (cost.cycles, cost.flops) == (7, 2 * 64 * 32 * 32)
    assert [(part.name, part.cycles, part.times, part.flops) for part in cost.parts] == [("f", 7, 1, cost.flops)]


def counted(trips: int) -> tuple[str, str, str]:
    state = f"(s32[], {SHAPE})"
    body = f"""%body (s: {state}) -> {state} {{
  %s = {state} parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %v = {SHAPE} get-tuple-element(%s), index=1
  %f = {SHAPE} fusion(%v), kind=kOutput, calls=%product, {CYCLES % 100}
  ROOT %out = {state} tuple(%next, %f)
}}
"""
    condition = f"""%condition (c: {state}) -> pred[] {{
  %c = {state} parameter(0)
  %j = s32[] get-tuple-element(%c), index=0
  %limit = s32[] constant({trips})
  ROOT %lt = pred[] compare(%j, %limit), direction=LT
}}
"""
    entry = f"""%zero = s32[] constant(0)
%t = {state} tuple(%zero, %x)
%loop = {state} while(%t), condition=%condition, body=%body
ROOT %r = {SHAPE} get-tuple-element(%loop), index=1"""
    return entry, body, condition


def test_a_loop_counts_its_body_as_often_as_it_runs():
    entry, body, condition = counted(28)
    cost = only(entry, PRODUCT, body, condition)
    assert (cost.cycles, cost.flops, cost.unknown_loops) == (2800, 28 * 2 * 64 * 32 * 32, 0)
    assert cost.parts[0].times == 28


def test_a_loop_of_unknown_length():
    entry, body, condition = counted(28)
    text = program(f"%x = {SHAPE} parameter(0)\n{entry}", PRODUCT, body, condition.replace("LT", "NE"))
    assert (program_cost(text).cycles, program_cost(text).unknown_loops) == (100, 1)
    assert (program_cost(text, decided=Decided(7)).cycles, program_cost(text, decided=Decided(7)).unknown_loops) == (
        700,
        1,
    )


@pytest.mark.parametrize(
    "branches", ["branch_computations={%cheap, %dear}", "true_computation=%dear, false_computation=%cheap"]
)
def test_of_branches_the_dearest_counts(branches):
    cheap, dear = (
        computation(name, f"  ROOT %{name}.n = {SHAPE} negate(%{name}.p), {CYCLES % cycles}")
        for name, cycles in (("cheap", 3), ("dear", 30))
    )
    source = 'metadata={op_name="jit(f)/rare/cond"}'
    line = f"%which = s32[] constant(0)\nROOT %c = {SHAPE} conditional(%which, %x, %x), {branches}, {source}"
    assert only(line, cheap, dear).cycles == 30
    text = program(f"%x = {SHAPE} parameter(0)\n{line}", cheap, dear)
    costs = {name: program_cost(text, decided=Decided(skipped=(name,))).cycles for name in ("rare", "usual")}
    assert costs == {"rare": 3, "usual": 30}


SIZE = 64 * 32 * 4


@pytest.mark.parametrize(
    ("line", "moved"),
    [
        (f"ROOT %c = {SHAPE} all-reduce(%x), channel_id=1, to_apply=%sum", {"all-reduce": SIZE}),
        ("ROOT %c = f32[256,32] all-gather(%x), channel_id=1, dimensions={0}", {"all-gather": 4 * SIZE}),
        ("ROOT %c = f32[16,32] reduce-scatter(%x), channel_id=1, dimensions={0}", {"reduce-scatter": SIZE}),
        (f"%s = ({SHAPE}, f32[256,32]) all-gather-start(%x), channel_id=1", {"all-gather": 4 * SIZE}),
        (
            f"%s = ({SHAPE}, {SHAPE}, u32[], u32[]) collective-permute-start(%x), channel_id=1\n"
            f"ROOT %d = {SHAPE} collective-permute-done(%s)",
            {"collective-permute": SIZE},
        ),
        (f"ROOT %c = ({SHAPE}, {SHAPE}) all-reduce(%x, %x), channel_id=1", {"all-reduce": 2 * SIZE}),
        (
            f"%token = token[] after-all()\n%s = ({SHAPE}, u32[], token[]) send(%x, %token), channel_id=4, "
            'frontend_attributes={_xla_megascale_transfer_type="ALL_GATHER"}',
            {"between slices, all-gather": SIZE},
        ),
    ],
)
def test_bytes_of_collectives(line, moved):
    cost = only(line)
    assert cost.moved == moved
    assert cost.calls == dict.fromkeys(moved, 1)


def test_the_pieces_of_one_collective_are_one():
    pieces = [
        computation(name, f"  ROOT %{name}.g = f32[256,32] all-gather(%{name}.p), channel_id=9, dimensions={{0}}")
        for name in ("start", "middle", "done")
    ]
    entry = "\n".join(f"%f.{name} = {SHAPE} fusion(%x), kind=kCustom, calls=%{name}" for name in ("start", "middle"))
    cost = only(f"{entry}\nROOT %r = f32[256,32] fusion(%x), kind=kCustom, calls=%done", *pieces)
    assert (cost.moved, cost.calls) == ({"all-gather": 4 * SIZE}, {"all-gather": 1})


def test_collectives_by_themselves_may_share_a_channel():
    """Those of `shard_map` all have the same."""
    lines = (f"%c.{i} = f32[256,32] all-gather(%x), channel_id=1, dimensions={{0}}" for i in range(3))
    assert only("\n".join((*lines, f"ROOT %r = {SHAPE} negate(%x)"))).calls == {"all-gather": 3}


def test_a_reduction_of_which_each_keeps_a_part():
    inner = computation("all-reduce-scatter.3", f"  %r = {SHAPE} all-reduce(%all-reduce-scatter.3.p), channel_id=2")
    cost = only("ROOT %f = f32[16,32] fusion(%x), kind=kCustom, calls=%all-reduce-scatter.3", inner)
    assert cost.moved == {"reduce-scatter": SIZE}


@pytest.mark.parametrize(
    ("name", "attributes", "products"),
    [
        ("splash_mha_fwd_residuals.4", "", 2),
        ("splash_mha_dq.1", "", 3),
        ("splash_mha_dkv.1", "", 4),
        ("splash_mha_dkv.1", r'metadata="\"use_fused_bwd_kernel\": true"', 5),
        ("other_kernel.1", "", 0),
    ],
)
def test_kernels_of_attention(name, attributes, products):
    lines = f"""%mask = s8[1,16,16] constant(0)
%q = bf16[8,2048,128] constant(0)
%k = bf16[2048,128] constant(0)
%{name} = bf16[8,2048,128] custom-call(%mask, %q, %k, %k), custom_call_target="tpu_custom_call", {attributes}"""
    cost = only(lines)
    assert cost.kernels == {name.partition(".")[0]: 1}
    assert cost.kernel_flops == products * 2 * 8 * 2048 * 2048 * 128 // 2  # half of it is seen
