#!/usr/bin/env bash
# Checks one NVIDIA GPU in at most eight minutes, and prints one table: versions, rates, numerics against this machine's CPU,
# attention, lanes, parallel evaluations, and the speed of decoding and training beside the published class in PyTorch.
#
#   bash launch/device_check.sh [--out DIR] [--minutes N] [--config NAME] [--smollm2 FOLDER_OR_GGUF] [OPTION ...]
#   bash launch/device_check.sh --help        lists all options
#   bash launch/device_check.sh --rehearse    runs everything with tiny sizes, on a machine without a GPU
#
# It runs with `python`, or with the Python that L2D_PYTHON names, which must have what requirements.txt lists and a jax for
# CUDA. It installs nothing and needs no network. The exit status is 0, or 1 if a row of the table failed, or 2 without a GPU.
set -euo pipefail

python=${L2D_PYTHON:-python}
if [[ $python =~ ^3\.[0-9]+$ ]]; then python=python$python; fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

kind=cuda
for argument in "$@"; do
  if [[ $argument == --rehearse ]]; then kind=cpu; fi
done
# shellcheck source=launch/flags.sh
source "$root/launch/flags.sh" "$kind"

export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
unset PYTHONDONTWRITEBYTECODE              # each part would compile all that it imports
exec "$python" -P -m tests.device.check "$@" # -P: a folder `tests` where it is called is not meant
