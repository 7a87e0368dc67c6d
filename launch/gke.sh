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
# --secret NAME       jobset: a Secret of Kubernetes whose keys become variables, such as HF_TOKEN and WANDB_API_KEY:
#                         kubectl create secret generic NAME --from-file=HF_TOKEN=FILE --from-file=WANDB_API_KEY=FILE
# --service-account NAME    jobset: of Kubernetes, with access to the bucket (Workload Identity); else the nodes' own
# --volume CLAIM      jobset: a volume that all pods can write (ReadWriteMany), at /mnt/shared
# --restarts N        how often a run that was taken away, or has crashed, is started again, and resumes; default 50.
#                     Bad input (exit status 2) ends it at once
# --spot              jobset: on spot nodes alone
# --cluster CLUSTER, --project PROJECT, --zone ZONE      xpk's own; the last two are gcloud's by default
# --print             shows the command and runs nothing
#
# Afterwards:  kubectl logs --selector jobset.sigs.k8s.io/jobset-name=NAME --prefix --follow
#              kubectl delete jobset NAME          then the same command again resumes
# The workdir is in a bucket (gs://BUCKET/RUN) or in /mnt/shared; data and model are where every pod sees them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/command.sh
source launch/kubernetes.sh
source launch/slices.sh

action='' name='' type='' image='' cluster='' restarts=50 spot='' account='' claim='' place=() variables=() secrets=()
mount=/mnt/shared

while (($#)); do
  case $1 in
    --type | --image | --cluster | --project | --zone | --restarts | --env) _l2d_value "$@" ;;
    --secret | --service-account | --volume) _l2d_value "$@" && _l2d_check_name "$@" ;;
  esac
  case $1 in
    --type) type=$2 && shift ;;
    --image) image=$2 && shift ;;
    --cluster) cluster=$2 && shift ;;
    --project | --zone) place+=("$1=$2") && shift ;;
    --restarts) restarts=$2 && shift ;;
    --env) _l2d_check_variable "$2" && variables+=("$2") && shift ;;
    --secret) secrets+=("$2") && shift ;;
    --service-account) account=$2 && shift ;;
    --volume) claim=$2 && shift ;;
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
_l2d_check_image "$action" "$image"
[[ $restarts =~ ^[0-9]+$ ]] || _l2d_refuse "--restarts takes a number, got '$restarts'"
if [[ $action == xpk ]]; then
  [[ -n $cluster ]] || _l2d_refuse "xpk needs --cluster CLUSTER"
  [[ -z $spot ]] || _l2d_refuse "--spot is for jobset: xpk's clusters are made with it"
  [[ -z $account$claim && ${#secrets[@]} == 0 ]] || _l2d_refuse "--secret, --service-account and --volume are for jobset"
else
  [[ -z $cluster && ${#place[@]} == 0 ]] || _l2d_refuse "--cluster, --project and --zone are for xpk: kubectl has its own"
fi
_l2d_slice "$type"
_l2d_check_program "${1:-}"
program=(python -m "l2d_jax.$1" "${@:2}")
_l2d_check_workdir "${claim:+$mount/*}" \
  "would be gone with its container: name gs://BUCKET/RUN, or a folder of $mount with --volume CLAIM" "${@:2}"
_l2d_need "$tool"

# The pods' variables are those of flags.sh and --env, whatever this machine has set for itself.
unset JAX_PLATFORMS
source launch/flags.sh tpu
if [[ " ${variables[*]-}" != *" JAX_PLATFORMS="* ]]; then
  variables=("JAX_PLATFORMS=$JAX_PLATFORMS" ${variables[@]+"${variables[@]}"})
fi

# What a job needs of the cluster.
check_cluster() {
  local things=(${secrets[@]+"${secrets[@]/#/secret/}"})
  if [[ -n $account ]]; then things+=("serviceaccount/$account"); fi
  if [[ -n $claim ]]; then things+=("persistentvolumeclaim/$claim"); fi
  _l2d_check_cluster ${things[@]+"${things[@]}"}
}

jobset() {
  local text nodes='on nodes of any price' mounted='none other' volume='none other'
  if [[ -n $spot ]]; then nodes=$'spot nodes alone\n                cloud.google.com/gke-spot: "true"'; fi
  if [[ -n $claim ]]; then
    mounted=$'the workdir\n                    - {name: workdir, mountPath: '$mount'}'
    volume=$'the workdir\n                - {name: workdir, persistentVolumeClaim: {claimName: "'$claim'"}}'
  fi
  text=$(<launch/jobset.yaml)
  text=${text//__NAME__/$name}
  text=${text//__RESTARTS__/$restarts}
  text=${text//__HOSTS__/$_l2d_hosts}
  text=${text//__CHIPS__/$_l2d_chips}
  text=${text//__ACCELERATOR__/$_l2d_accelerator}
  text=${text//__TOPOLOGY__/$_l2d_topology}
  text=${text//__IMAGE__/$image}
  text=${text//__SPOT__/$nodes}
  text=${text//__ACCOUNT__/${account:-default}}
  text=${text//__HOST_NETWORK__/$([[ -n $account ]] && echo false || echo true)}
  text=${text//__MOUNT__/$mounted}
  text=${text//__VOLUME__/$volume}
  text=${text//__SECRETS__/$(_l2d_secrets ${secrets[@]+"${secrets[@]}"})}
  text=${text//__VARIABLES__/$(_l2d_variables "${variables[@]}")}
  text=${text//__ARGUMENTS__/$(_l2d_words "${program[@]}")} # last: nothing in them is read as a name
  [[ -n $_l2d_print ]] || check_cluster
  _l2d_submit create "$text"
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
