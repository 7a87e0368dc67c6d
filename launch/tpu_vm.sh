#!/usr/bin/env bash
# Runs a program of the package on a TPU VM, as on each host of a slice (launch/pod.sh):
#
#   bash launch/tpu_vm.sh [OPTION ...] PROGRAM [ARGUMENT ...]
#   bash launch/tpu_vm.sh [--print] --install
#
#   bash launch/tpu_vm.sh train --config qwen7b --workdir gs://BUCKET/qwen7b
#
# --install   prepares the machine, and runs nothing: huge pages (which wants sudo), the environment, and Python 3.12 for
#             it where there is none from 3.11 on (the images have 3.10)
# --before CMD                                    runs CMD first, in bash, such as a mount; it has to allow a second time
# --secret NAME=projects/PROJECT/secrets/SECRET   a variable for the program, such as HF_TOKEN, which gcloud reads from
#             Secret Manager; of the latest version, or of the one that /versions/VERSION adds
# --print     shows the commands and runs none
#
# The same command again resumes. launch/flags.sh explains the environment variables.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/command.sh

install='' before='' secrets=()
while [[ ${1:-} == -* ]]; do
  case $1 in
    --before | --secret) _l2d_value "$@" ;;
  esac
  case $1 in
    --install) install=1 ;;
    --before) before=$2 && shift ;;
    --secret) _l2d_check_secret "$2" && secrets+=("$2") && shift ;;
    --print) _l2d_print=1 ;;
    --help) _l2d_help "launch/${0##*/}" && exit ;;
    *) _l2d_refuse "unknown option $1 (--help lists the options)" ;;
  esac
  shift
done

# fail MESSAGE: ends as a program does that has stopped, so that pod.sh tries again.
fail() {
  echo "error: $*" >&2
  exit 1
}

# read_secret NAME=RESOURCE: exports it. A shell's own variable shows in no command line.
read_secret() {
  local resource=${1#*=} value
  [[ $resource == */versions/* ]] || resource+=/versions/latest
  if [[ -n $_l2d_print ]]; then
    echo "export ${1%%=*}=\"\$(gcloud secrets versions access $resource)\""
  else
    value=$(gcloud secrets versions access "$resource") || fail "$resource cannot be read: see the line above"
    export "${1%%=*}=$value"
  fi
}

if [[ -n $install ]]; then
  (($# == 0)) || _l2d_refuse "--install runs no program, got '$1'"
  # The TPU runtime starts and stops much faster with them on v5e and later: JAX warns where they are off.
  _l2d_run sudo sh -c 'echo always > /sys/kernel/mm/transparent_hugepage/enabled'
  _l2d_run source launch/environment.sh tpu,gcs
else
  _l2d_check_program "${1:-}"
  program=$1
  shift
  if [[ -n $before ]]; then _l2d_run bash -c "$before" || fail "--before ended with status $?: $before"; fi
  for secret in ${secrets[@]+"${secrets[@]}"}; do read_secret "$secret"; done
  _l2d_run source launch/environment.sh tpu,gcs
  _l2d_run source launch/flags.sh tpu
  _l2d_run exec python -m "l2d_jax.$program" "$@"
fi
