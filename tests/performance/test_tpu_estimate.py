import re
from types import SimpleNamespace

import pytest

from l2d_jax.performance import tpu_estimate
from l2d_jax.performance.hlo_cost import Decided
from l2d_jax.performance.topologies import GENERATIONS, GIB
from tests.support.hlo_text import CYCLES, PRODUCT, SHAPE

V5E = GENERATIONS["v5e"]
FLOPS = 2 * 64 * 32 * 32
TEXT = f"""{PRODUCT}
ENTRY %main (x: {SHAPE}) -> {SHAPE} {{
  %x = {SHAPE} parameter(0)
  %f.1 = {SHAPE} fusion(%x), kind=kOutput, calls=%product, metadata={{op_name="jit(f)/jvp(llm)/dot"}}, {CYCLES % 3}
  %g = f32[256,32] all-gather(%x), channel_id=1, dimensions={{0}}
  %r = {SHAPE} all-reduce(%x), channel_id=2
  %begun = ({SHAPE}, {SHAPE}, u32[]) copy-start(%x)
  %copied = {SHAPE} copy-done(%begun)
  %s = ({SHAPE}, u32[], token[]) send(%x), frontend_attributes={{_xla_megascale_transfer_type="ALL_REDUCE"}}
  ROOT %c = {SHAPE} copy(%f.1), metadata={{op_name="jit(step)/transpose(jvp(diffusion_path))/\
checkpoint/rematted_computation/copy"}}, {CYCLES % 1}
}}
"""


def figures(**sizes: int) -> dict:
    names = ("argument", "output", "alias", "temp", "generated_code")
    memory = SimpleNamespace(**{f"{name}_size_in_bytes": sizes.get(name, 0) for name in names})
    return tpu_estimate.read_estimate(memory, TEXT, V5E, useful=FLOPS / 2, tokens=300, decided=Decided())


def test_figures():
    found = figures(argument=7 * GIB, output=2 * GIB, alias=1 * GIB, temp=3 * GIB, generated_code=GIB)
    assert found["needed"] == 12 * GIB
    assert found["usable"] == 15.75 * GIB
    assert tpu_estimate.fits(found)
    assert (found["cycles"], found["FLOPs"]) == (4, FLOPS)
    assert found["seconds"] == pytest.approx(4 / 1.5e9, rel=0.01)
    assert found["share of peak"] == pytest.approx(FLOPS / 2 / (4 * V5E.per_cycle))
    size = 64 * 32 * 4
    assert found["seconds of waiting"] == pytest.approx(size / (0.75 * V5E.memory))
    assert found["tokens per second"] == pytest.approx(300 / (V5E.seconds(4) + found["seconds of waiting"]))
    assert found["seconds on the links"] == pytest.approx((4 * size + 2 * size) / V5E.links)
    seconds = {name: phase["seconds"] for name, phase in found["phases"].items() if phase["seconds"]}
    assert seconds == pytest.approx(
        {
            "pass over the context": V5E.seconds(3),
            "recomputed for the backward pass": V5E.seconds(1),
        }
    )


def test_the_table():
    text = "\n".join(tpu_estimate.estimate_lines(figures(argument=14 * GIB), top=2))
    assert "fits, 1.75 GiB (11%) to spare" in text
    assert "2.00 of the useful" in text
    assert re.search("pass over the context +75.0%, of which products 75.0%, at 33% of peak", text)
    assert "25.0%      1        -  c: " in text
    assert "f.1" not in "\n".join(tpu_estimate.estimate_lines(figures()))


def test_what_is_too_large():
    found = figures(argument=18 * GIB)
    assert not tpu_estimate.fits(found)
    assert "does not fit: 2.25 GiB (14%) too much" in "\n".join(tpu_estimate.estimate_lines(found))


@pytest.mark.parametrize(
    "message",
    [
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (17.50G) exceeds "
        "available HBM (15.75G).",
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 17.50G of "
        "15.75G hbm. Exceeded hbm capacity by 1.75G.",
    ],
)
def test_what_the_compiler_refused(message):
    found = tpu_estimate.too_large(message)
    assert found == {"needed": 17.5 * GIB, "usable": 15.75 * GIB}
    lines = tpu_estimate.estimate_lines(found)
    assert lines[-1].split("  ")[-1] == "does not fit: 1.75 GiB (11%) too much"
    assert tpu_estimate.too_large("INTERNAL: Mosaic failed") is None
    assert tpu_estimate.too_large("RESOURCE_EXHAUSTED: scoped vmem limit") is None
