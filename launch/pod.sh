#!/usr/bin/env bash
# Runs a program of the package on all hosts of a TPU slice, from a machine with gcloud:
#
#   bash launch/pod.sh create  NAME --zone ZONE --type TYPE [--spot] [--runtime VERSION]
#   bash launch/pod.sh install NAME --zone ZONE
#   bash launch/pod.sh run     NAME --zone ZONE [OPTION ...] [--retry --type TYPE [--spot]] PROGRAM [ARGUMENT ...]
#   bash launch/pod.sh stop    NAME --zone ZONE
#   bash launch/pod.sh logs    NAME --zone ZONE
#   bash launch/pod.sh delete  NAME --zone ZONE
#
# create    asks for the slice through the queue, and waits until it is there
# install   copies this clone to every host, without runs/, models/ and .venv/, and installs it there
# run       runs the program on every host and shows what they print; the same command again resumes. Its workdir is in a
#           bucket (gs://BUCKET/RUN) or in a folder that all hosts share; data and model are where every host sees them
# stop      ends the program as a preemption does, so that it saves first. (Ctrl-C ends what is shown here alone.)
# logs      fetches what every host printed to runs/pod/NAME/HOST.log
# delete    gives the slice back: it costs money until then
#
# --type TYPE         such as v5litepod-16, v6e-16 (chips) or v5p-16 (cores)
# --spot              cheaper, and taken away at any time
# --retry             when the slice is taken away: create, install and run again, which resumes; when the program has
#                     crashed: run again. Bad input (exit status 2), `stop` and a lost connection end it
# --restarts N        how often --retry does so; default 50
# --env NAME=VALUE    for the program, such as JAX_COMPILATION_CACHE_DIR=gs://BUCKET/compiled; see launch/flags.sh
# --secret NAME=projects/PROJECT/secrets/SECRET
#                     a variable for the program, such as HF_TOKEN, which every host reads from Secret Manager
# --before CMD        runs CMD on every host first, each time, in bash, such as a mount; it has to allow a second time
# --runtime VERSION   the image of the hosts; by default the one for TYPE
# --project PROJECT   by default gcloud's own
# --print             shows the commands and runs none
#
# ssh to many hosts wants the key in an agent: ssh-add ~/.ssh/google_compute_engine
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/command.sh
source launch/slices.sh

action='' name='' zone='' type='' runtime='' retry='' restarts=50 place=() kind=() variables=() first=()
while (($#)); do
  case $1 in
    --zone | --type | --runtime | --project | --restarts | --env | --secret | --before) _l2d_value "$@" ;;
  esac
  case $1 in
    --zone) zone=$2 && shift ;;
    --type) type=$2 && shift ;;
    --runtime) runtime=$2 && shift ;;
    --project) place+=("--project=$2") && shift ;;
    --restarts) restarts=$2 && shift ;;
    --env) _l2d_check_variable "$2" && variables+=("$2") && shift ;;
    --secret) _l2d_check_secret "$2" && first+=("$1" "$2") && shift ;;
    --before) first+=("$1" "$2") && shift ;;
    --spot) kind=(--spot) ;;
    --retry) retry=1 ;;
    --print) _l2d_print=1 ;;
    --help) _l2d_help "launch/${0##*/}" && exit ;;
    -*) _l2d_refuse "unknown option $1 (--help lists the options)" ;;
    *)
      if [[ -z $action ]]; then
        action=$1
      elif [[ -z $name ]]; then
        name=$1
      else
        break # the program and its own arguments
      fi
      ;;
  esac
  shift
done

case $action in
  create | install | run | stop | logs | delete) ;;
  *) _l2d_refuse "no command '$action': choose from create, install, run, stop, logs, delete" ;;
esac
[[ $name =~ ^[a-z]([a-z0-9-]*[a-z0-9])?$ ]] || _l2d_refuse "a slice's NAME is of letters, digits and dashes, got '$name'"
[[ -n $zone ]] || _l2d_refuse "$action needs --zone ZONE"
if [[ $action == create || -n $retry ]]; then
  [[ -n $type ]] || _l2d_refuse "$action needs --type TYPE, such as v5litepod-16"
  _l2d_slice "$type"
fi
[[ $restarts =~ ^[0-9]+$ ]] || _l2d_refuse "--restarts takes a number, got '$restarts'"
if [[ $action == run ]]; then
  _l2d_check_program "${1:-}"
  [[ -z $retry ]] || _l2d_check_workdir '/*' \
    "would be gone with its slice: name gs://BUCKET/RUN, or the full path of a folder that all hosts share" "${@:2}"
elif (($#)); then
  _l2d_refuse "$action takes no further argument, got '$1'"
fi
_l2d_need gcloud
place+=("--zone=$zone")

# on_hosts SHELL_COMMAND [OPTION ...]
on_hosts() {
  local words=$1
  shift
  _l2d_run gcloud compute tpus tpu-vm ssh "$name" "${place[@]}" --worker=all "$@" "--command=$words"
}

create() {
  _l2d_run gcloud compute tpus queued-resources create "$name" "${place[@]}" "--node-id=$name" \
    "--accelerator-type=$type" "--runtime-version=${runtime:-$_l2d_runtime}" ${kind[@]+"${kind[@]}"} || return
  local state='' ask=(gcloud compute tpus queued-resources describe "$name" "${place[@]}" "--format=value(state.state)")
  if [[ -n $_l2d_print ]]; then
    echo "# every 30 seconds, until it says ACTIVE:"
    _l2d_run "${ask[@]}"
    return
  fi
  until [[ $state == ACTIVE ]]; do
    if [[ $state == FAILED || $state == SUSPENDED ]]; then
      echo "the request for $name is $state: delete it, and ask again" >&2
      return 1
    fi
    sleep 30
    state=$("${ask[@]}" || true) # which may fail for a while
    echo "$(date +%H:%M:%S) $name is $state"
  done
}

install() {
  local archive=runs/pod/$name.tar.gz
  local left_out=(--exclude=./runs --exclude=./models --exclude=./.venv --exclude=./.git '--exclude=./.*_cache')
  _l2d_run mkdir -p runs/pod \
    && _l2d_run tar -czf "$archive" "${left_out[@]}" . \
    && _l2d_run gcloud compute tpus tpu-vm scp "$archive" "$name:l2d_jax.tar.gz" "${place[@]}" --worker=all \
    && on_hosts "mkdir -p l2d_jax && tar -xzf l2d_jax.tar.gz -C l2d_jax && cd l2d_jax && bash launch/tpu_vm.sh --install"
}

delete() {
  _l2d_run gcloud compute tpus queued-resources delete "$name" "${place[@]}" --force --quiet
}

run() {
  local status words state
  words=$(_l2d_quote env ${variables[@]+"${variables[@]}"} bash launch/tpu_vm.sh ${first[@]+"${first[@]}"} "$@")
  # tee -p goes on writing the log when nobody listens any more.
  words="set -o pipefail; cd l2d_jax && mkdir -p runs && $words 2>&1 | tee -p -a runs/pod.log"
  if [[ -n $_l2d_print ]]; then
    on_hosts "$words"
    if [[ -n $retry ]]; then
      echo "# if that fails, a minute later, and the slice is not READY:"
      _l2d_run "${node[@]}"
      replace
      echo "# and run again"
    fi
    return
  fi
  while true; do
    status=0
    on_hosts "$words" || status=$?
    if [[ $status == 0 || $status == 2 || -z $retry ]] || ((restarts-- == 0)); then return "$status"; fi
    sleep 60 # a slice that is being taken away says READY for some seconds more
    until state=$("${node[@]}" 2>&1) || [[ $state == *NOT_FOUND* ]]; do # no answer is not yet a loss
      echo "$state" >&2
      sleep 60
    done
    if [[ $state != *READY* ]]; then
      echo "$(date +%H:%M:%S) $name was taken away: asking for another" >&2
      replace || echo "$(date +%H:%M:%S) there is no other yet" >&2
    elif [[ $status == 143 || $status == 255 ]]; then # of `stop`; of ssh, while the program may go on
      return "$status"
    else
      echo "$(date +%H:%M:%S) the program ended with status $status: running it again" >&2
    fi
  done
}

replace() {
  delete || true # it may be gone
  create && install
}
node=(gcloud compute tpus tpu-vm describe "$name" "${place[@]}" "--format=value(state)")

case $action in
  stop) on_hosts "pkill -TERM -f '[p]ython -m l2d_jax'" ;;
  logs)
    _l2d_run mkdir -p "runs/pod/$name"
    on_hosts "cat l2d_jax/runs/pod.log" "--output-directory=runs/pod/$name"
    ;;
  *) "$action" "$@" ;;
esac
