"""Counting kernels in the text of a program; compiling for a GPU needs XLA's plugin."""

import pytest

from l2d_jax.performance.hlo import HloProgram
from tests.device import compiled

PROGRAM = """HloModule program

%fused (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %add = f32[8]{0} add(%p, %p)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %copy.1 = f32[8]{0} copy(%x)
  %bitcast.1 = f32[8]{0} bitcast(%copy.1)
  ROOT %fusion = f32[8]{0} fusion(%bitcast.1), kind=kLoop, calls=%fused
}
"""


def test_operations_within_a_fusion_are_no_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    program = HloProgram.parse(PROGRAM)
    assert {name: [one.name for one in run] for name, run in compiled.kernels(program).items()} == {
        "main": ["copy.1", "fusion"]
    }
    compiled.report(program, top=2)
    assert capsys.readouterr().out.splitlines()[0] == "main: 2 kernels, 0.00 GB of operands and results"
    assert compiled.traffic(program.computations["main"]["fusion"], program.computations["main"]) == 64


def test_without_the_compiler_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "find_package", lambda _: None)
    with pytest.raises(SystemExit, match="pip install jax-cuda12-pjrt=="):
        compiled.described_gpus("H200", 1)


def test_a_description_names_every_gpu() -> None:
    for name in compiled.GPUS:
        assert f'device_description_str: "{name}"' in compiled.describe(name)
