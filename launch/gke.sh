#!/usr/bin/env bash
# Runs a program of the package on a TPU slice of a GKE cluster, in a container:
#
#   docker build --file launch/Containerfile --tag IMAGE . && docker push IMAGE
#   bash launch/gke.sh jobset NAME --type TYPE --image IMAGE [OPTION ...] PROGRAM [ARGUMENT ...]
#   bash launch/gke.sh xpk    NAME --type TYPE --image IMAGE --cluster CLUSTER [OPTION ...] PROGRAM [ARGUMENT ...]
#
# jobset    with kubectl alone: fills in launch/jobset.yaml. The cluster needs JobSet, and a node pool of that TYPE
# xpk       with xpk, in a cluster that `xpk cluster create` has made
#
# --type TYPE         such as v5litepod-16, v6e-16 (chips) or v5p-16 (cores)
# --env NAME=VALUE    for the program, such as JAX_COMPILATION_CACHE_DIR=gs://BUCKET/compiled; see launch/flags.sh
# --restarts N        how often a run that was taken away, or has crashed, is started again, and resumes; default 50
# --spot              jobset: on spot nodes alone
# --cluster CLUSTER, --project PROJECT, --zone ZONE      xpk's own; the last two are gcloud's by default
# --print             shows the command and runs nothing
#
# Afterwards:  kubectl logs --selector jobset.sigs.k8s.io/jobset-name=NAME --prefix --follow
#              kubectl delete jobset NAME          then the same command again resumes
# The workdir, data and model must be where every pod sees them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/command.sh
source launch/slices.sh

action='' name='' type='' image='' cluster='' restarts=50 spot='' place=() variables=()
while (($#)); do
  case $1 in
    --type | --image | --cluster | --project | --zone | --restarts | --env) _l2d_value "$@" ;;
  esac
  case $1 in
    --type) type=$2 && shift ;;
    --image) image=$2 && shift ;;
    --cluster) cluster=$2 && shift ;;
    --project | --zone) place+=("$1=$2") && shift ;;
    --restarts) restarts=$2 && shift ;;
    --env) _l2d_check_variable "$2" && variables+=("$2") && shift ;;
    --spot) spot=1 ;;
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
  jobset) tool=kubectl ;;
  xpk) tool=xpk ;;
  *) _l2d_refuse "no command '$action': choose from jobset, xpk" ;;
esac
[[ $name =~ ^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$ ]] \
  || _l2d_refuse "a run's NAME is of up to 40 small letters, digits and dashes, got '$name'"
[[ -n $type ]] || _l2d_refuse "$action needs --type TYPE, such as v6e-16"
[[ $image =~ ^[A-Za-z0-9][A-Za-z0-9._:/@-]*$ ]] || _l2d_refuse "$action needs --image IMAGE, got '$image'"
[[ $restarts =~ ^[0-9]+$ ]] || _l2d_refuse "--restarts takes a number, got '$restarts'"
if [[ $action == xpk ]]; then
  [[ -n $cluster ]] || _l2d_refuse "xpk needs --cluster CLUSTER"
  [[ -z $spot ]] || _l2d_refuse "--spot is for jobset: xpk's clusters are made with it"
else
  [[ -z $cluster && ${#place[@]} == 0 ]] || _l2d_refuse "--cluster, --project and --zone are for xpk: kubectl has its own"
fi
_l2d_slice "$type"
_l2d_check_program "${1:-}"
program=(python -m "l2d_jax.$1" "${@:2}")
_l2d_need "$tool"

# The pods' variables are those of flags.sh and --env, whatever this machine has set for itself.
unset JAX_PLATFORMS
source launch/flags.sh tpu
variables=("JAX_PLATFORMS=$JAX_PLATFORMS" ${variables[@]+"${variables[@]}"})

# A YAML string. Kubernetes reads "$" in it: two stand for one.
yaml() {
  if [[ $1 == *[[:cntrl:]]* ]]; then _l2d_refuse "control characters cannot be handed on, got $(printf %q "$1")"; fi
  local text=${1//\\/\\\\}
  text=${text//\"/\\\"}
  printf '"%s"' "${text//\$/\$\$}"
}

jobset() {
  local text word between='' arguments='' listed=''
  for word in "${program[@]}"; do
    arguments+="$between$(yaml "$word")"
    between=', '
  done
  between=''
  for word in "${variables[@]}"; do
    listed+="$between{name: ${word%%=*}, value: $(yaml "${word#*=}")}"
    between=', '
  done
  text=$(<launch/jobset.yaml)
  text=${text//__NAME__/$name}
  text=${text//__RESTARTS__/$restarts}
  text=${text//__HOSTS__/$_l2d_hosts}
  text=${text//__CHIPS__/$_l2d_chips}
  text=${text//__ACCELERATOR__/$_l2d_accelerator}
  text=${text//__TOPOLOGY__/$_l2d_topology}
  text=${text//__IMAGE__/$image}
  if [[ -n $spot ]]; then
    text=${text//__SPOT__/$'spot nodes alone\n                cloud.google.com/gke-spot: "true"'}
  else
    text=${text//__SPOT__/on nodes of any price}
  fi
  text=${text//__VARIABLES__/[$listed]}
  text=${text//__ARGUMENTS__/[$arguments]} # last: nothing in them is read as a name
  if [[ -n $_l2d_print ]]; then
    printf '%s\n' "kubectl create --filename - <<'END'" "$text" END
  else
    kubectl create --filename - <<<"$text"
  fi
}

xpk_workload() {
  local words=(xpk workload create "--workload=$name" "--cluster=$cluster" ${place[@]+"${place[@]}"}
    "--tpu-type=$type" --num-slices=1 "--docker-image=$image" "--max-restarts=$restarts"
    --restart-on-exit-codes=1 --termination-grace-period-seconds=120) # what it restarts on by itself leaves out 1
  local word
  for word in "${variables[@]}"; do words+=("--env=$word"); done
  _l2d_run "${words[@]}" "--command=$(_l2d_quote "${program[@]}")"
}

if [[ $action == jobset ]]; then jobset; else xpk_workload; fi
