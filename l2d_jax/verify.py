"""Compares a model with recorded numbers: `python -m l2d_jax.verify --model DIR --reference FILE.npz`.

One line per array: name, largest difference, pass or FAIL; exit status 1 if any fails. Where the recording says that a
run met a near tie, it is reported and not judged. `meta.json` beside the recording describes its runs.
"""

from pathlib import Path

import jax

from l2d_jax import command_line, reference
from l2d_jax.loaded import load
from l2d_jax.recording import Recording


def main() -> int:
    """Parse the command line, print the table, and return 1 if an array fails."""
    parser = command_line.Parser(prog="python -m l2d_jax.verify", description=__doc__)
    parser.add_argument("--model", required=True, help="a model folder")
    parser.add_argument("--reference", type=Path, required=True, help="arrays recorded from the authors' release")
    options = parser.parse_args()
    recording = Recording.open(options.reference)
    loaded = load(options.model, dtype="float32")
    failed = compared = 0
    with jax.default_matmul_precision("highest"):
        for check in reference.checks(loaded.model, recording):
            verdict = "pass" if check.passed() else "FAIL"
            if not check.judged:
                verdict = "(near tie, not judged)"
            kind = "relative" if check.relative else "absolute"
            print(f"{check.name:<64} {check.difference():9.2e} {kind}  {verdict}", flush=True)
            failed += verdict == "FAIL"
            compared += check.judged
    print(f"{compared - failed} of {compared} arrays pass")
    return int(failed > 0)


if __name__ == "__main__":
    command_line.run(main)
