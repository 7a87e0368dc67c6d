#!/usr/bin/env bash
# Runs the tests on a machine that has only Python:
#
#   bash launch/test.sh [PYTEST_ARGUMENTS]          the fast tests, which cover every capability once
#   bash launch/test.sh --all [PYTEST_ARGUMENTS]    all tests, some on a real model, which is fetched
#
# Four files run at a time, since many tests wait for programs that they start. --numprocesses=0 runs one after the other.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

slow=()
if [[ ${1:-} == --all ]]; then
  slow=(--slow) && shift
fi
source launch/environment.sh dev
if ((${#slow[@]})); then source launch/smollm2.sh; fi
source launch/flags.sh cpu # memory that compilation gives back is fetched anew each time
exec python -m pytest ${slow[@]+"${slow[@]}"} --numprocesses=4 --dist=loadfile --no-loadscope-reorder "$@"
