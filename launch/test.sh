#!/usr/bin/env bash
# Runs the tests on a machine that has only Python:
#
#   bash launch/test.sh [PYTEST_ARGUMENTS]            the fast tests, which cover every capability once
#   bash launch/test.sh --torch [PYTEST_ARGUMENTS]    these, and the slow ones that compare with PyTorch
#   bash launch/test.sh --all [PYTEST_ARGUMENTS]      all tests
#
# The last two try a real model, too, which they fetch. Four files run at a time, since many tests wait for programs that
# they start; --numprocesses=0 runs one after the other.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

chosen=()
case ${1:-} in
  --all) chosen=(--slow) && shift ;;
  --torch) chosen=(-m "torch or not slow") && shift ;;
esac
source launch/environment.sh dev
if ((${#chosen[@]})); then source launch/smollm2.sh; fi
source launch/flags.sh cpu # memory that compilation gives back is fetched anew each time
exec python -m pytest ${chosen[@]+"${chosen[@]}"} --numprocesses=4 --dist=loadfile --no-loadscope-reorder "$@"
