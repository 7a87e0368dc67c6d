"""The recorder of the authors' release, whose environment has other libraries than this one."""

import subprocess
import sys

from tests.support.programs import ROOT


def test_the_recorder_needs_no_jax():
    """Nor torch before it has looked for the release; an incomplete command line ends with one line."""
    absent = "import sys; sys.modules.update(dict.fromkeys(['jax', 'flax', 'jaxtyping', 'torch', 'transformers']))"
    record = "from l2d_jax.authors import record; sys.argv[1:] = ['--release', 'nowhere']; record.main()"
    ended = subprocess.run([sys.executable, "-c", f"{absent}; {record}"], cwd=ROOT, capture_output=True, text=True)
    assert ended.stderr.splitlines()[-1].startswith("l2d_jax.errors.InputError: no flow_llms in nowhere")
