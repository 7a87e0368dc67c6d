#!/usr/bin/env bash
# Runs a program of the package on a TPU VM, as on each host of a slice (launch/pod.sh):
#
#   bash launch/tpu_vm.sh [--print] PROGRAM [ARGUMENT ...]
#   bash launch/tpu_vm.sh [--print] --install
#
#   bash launch/tpu_vm.sh train --config configs/qwen7b.py --workdir runs/qwen7b
#
# --install   prepares the machine, and runs nothing: Python 3.12 where there is none from 3.11 on (the images have
#             3.10), huge pages, the environment; wants sudo
# --print     shows the commands and runs none
#
# The same command again resumes. launch/flags.sh explains the environment variables.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/command.sh

install=
while [[ ${1:-} == -* ]]; do
  case $1 in
    --install) install=1 ;;
    --print) _l2d_print=1 ;;
    --help) _l2d_help "launch/${0##*/}" && exit ;;
    *) _l2d_refuse "unknown option $1 (--help lists the options)" ;;
  esac
  shift
done

has_python() {
  local candidate
  for candidate in ${L2D_PYTHON:-python3 python3.12 python3.11}; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then return; fi
  done
  return 1
}

if [[ -n $install ]]; then
  (($# == 0)) || _l2d_refuse "--install runs no program, got '$1'"
  if [[ -n $_l2d_print ]] || ! has_python; then
    if [[ -n $_l2d_print ]]; then echo "# where no Python from 3.11 on is installed:"; fi
    _l2d_run sudo add-apt-repository --yes ppa:deadsnakes/ppa
    # A new machine updates itself in its first minutes.
    _l2d_run sudo apt-get -o DPkg::Lock::Timeout=600 install --yes python3.12 python3.12-venv
    if [[ -n $_l2d_print ]]; then echo "# everywhere:"; fi
  fi
  # The TPU runtime starts and stops much faster with them on v5e and later: JAX warns where they are off.
  _l2d_run sudo sh -c 'echo always > /sys/kernel/mm/transparent_hugepage/enabled'
  _l2d_run source launch/environment.sh tpu
else
  _l2d_check_program "${1:-}"
  program=$1
  shift
  _l2d_run source launch/environment.sh tpu
  _l2d_run source launch/flags.sh tpu
  _l2d_run exec python -m "l2d_jax.$program" "$@"
fi
