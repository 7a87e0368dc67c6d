#!/usr/bin/env bash
# Runs the tests on a machine that has only Python: bash launch/test.sh [pytest's own arguments]
# Four files at a time, since many wait for programs that they start; --numprocesses=0 runs them one after the other.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source launch/environment.sh dev
source launch/smollm2.sh # one real model, end to end
source launch/flags.sh cpu # memory that compilation gives back is fetched anew each time
exec python -m pytest --slow --numprocesses=4 --dist=loadfile --no-loadscope-reorder "$@"
