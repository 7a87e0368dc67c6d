#!/usr/bin/env bash
# Serves a model in a GKE cluster: servers on GPUs or TPUs, behind one address inside the cluster:
#
#   docker build --file launch/Containerfile --build-arg EXTRA=cuda,gcs,serve,structured --tag IMAGE . && docker push IMAGE
#   kubectl create secret generic KEY --from-literal=L2D_JAX_API_KEY="$(openssl rand -hex 32)"
#   bash launch/gke_serve.sh NAME --gpu nvidia-l4 --image IMAGE --key KEY [OPTION ...] -- --model MODEL [SERVE OPTION ...]
#
# What follows -- are options of `l2d serve`. The image for TPUs is built with EXTRA=tpu,gcs,serve,structured.
#
# --gpu TYPE[:N]      N GPUs (1) of GKE's type for each server, such as nvidia-l4 or nvidia-h100-80gb:2
# --type TYPE         instead, a TPU slice of one host for each server, such as v5litepod-1 or v6e-4
# --replicas N        number of servers; default 1
# --key SECRET        the Secret of Kubernetes that has the key of requests as L2D_JAX_API_KEY
# --drain SECONDS     time for requests under way when a server is to end; default 60. Spot nodes give 15 in all
# --env NAME=VALUE    for the server, such as JAX_COMPILATION_CACHE_DIR=gs://BUCKET/compiled; see launch/flags.sh
# --secret NAME       a Secret whose keys become variables, such as HF_TOKEN
# --service-account NAME    of Kubernetes, with access to the bucket (Workload Identity)
# --volume CLAIM      a volume that all pods can read (ReadOnlyMany or ReadWriteMany), at /mnt/shared: for models
# --spot              on spot nodes alone
# --print             shows the command and runs nothing
#
# Afterwards:  kubectl rollout status deployment/NAME        waits until the servers are ready
#              kubectl port-forward service/NAME 8000:80     the address is http://NAME inside the cluster
#              the same command again changes it; kubectl delete deployment,service,poddisruptionbudget NAME
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/command.sh
source launch/kubernetes.sh
source launch/slices.sh

name='' type='' gpu='' image='' replicas=1 key='' drain=60 spot='' account='' claim='' variables=() secrets=()
mount=/mnt/shared leaving=10 # seconds in which the balancers learn that a server leaves
ending=10                    # seconds after --drain in which the process ends by itself: 2 GRACE of serving/process.py

while (($#)); do
  case $1 in
    --type | --gpu | --image | --replicas | --drain | --env) _l2d_value "$@" ;;
    --key | --secret | --service-account | --volume) _l2d_value "$@" && _l2d_check_name "$@" ;;
  esac
  case $1 in
    --type) type=$2 && shift ;;
    --gpu) gpu=$2 && shift ;;
    --image) image=$2 && shift ;;
    --replicas) replicas=$2 && shift ;;
    --key) key=$2 && shift ;;
    --drain) drain=$2 && shift ;;
    --env) _l2d_check_variable "$2" && variables+=("$2") && shift ;;
    --secret) secrets+=("$2") && shift ;;
    --service-account) account=$2 && shift ;;
    --volume) claim=$2 && shift ;;
    --spot) spot=1 ;;
    --print) _l2d_print=1 ;;
    --help) _l2d_help "launch/${0##*/}" && exit ;;
    --) shift && break ;;
    -*) _l2d_refuse "unknown option $1 (--help lists the options; those of the server come after --)" ;;
    *)
      [[ -z $name ]] || _l2d_refuse "one NAME, got '$name' and '$1': options of the server come after --"
      name=$1
      ;;
  esac
  shift
done

[[ $name =~ ^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$ ]] \
  || _l2d_refuse "a NAME is of up to 40 small letters, digits and dashes, got '$name'"
_l2d_check_image "$name" "$image"
[[ -n $key ]] || _l2d_refuse "--key SECRET is missing: without a key, every pod of the cluster could use the server"
[[ $replicas =~ ^[0-9]+$ ]] || _l2d_refuse "--replicas takes a number, got '$replicas'"
[[ $drain =~ ^[1-9][0-9]*$ ]] || _l2d_refuse "--drain takes seconds, got '$drain'"
[[ -n $gpu || -n $type ]] || _l2d_refuse "name the devices of a server: --gpu nvidia-l4, or --type v6e-4"
[[ -z $gpu || -z $type ]] || _l2d_refuse "a server is on GPUs or on TPUs: give one of --gpu and --type"
fixed=(--host 0.0.0.0 --port 8000 --drain "$drain" --allow_host '*') # requests come under any name, and bring the key
for word; do
  word=${word%%=*}
  [[ $word != --* || " ${fixed[*]} " != *" $word "* ]] || _l2d_refuse "$word is set here: leave it out after --"
done

# The pods' variables are those of flags.sh and --env, whatever this machine has set for itself.
unset JAX_PLATFORMS XLA_PYTHON_CLIENT_MEM_FRACTION
if [[ -n $gpu ]]; then
  [[ $gpu =~ ^nvidia-[a-z0-9-]+(:[1-9][0-9]*)?$ ]] || _l2d_refuse "--gpu takes GKE's type, such as nvidia-l4:1, got '$gpu'"
  [[ $gpu == *:* ]] || gpu+=:1
  nodes="cloud.google.com/gke-accelerator: ${gpu%:*}" devices="nvidia.com/gpu: ${gpu#*:}" is_tpu=false
  source launch/flags.sh cuda
else
  _l2d_slice "$type"
  ((_l2d_hosts == 1)) || _l2d_refuse "a server is on one host, and $type has $_l2d_hosts: choose a type of up to 4 chips"
  nodes="cloud.google.com/gke-tpu-accelerator: $_l2d_accelerator
        cloud.google.com/gke-tpu-topology: $_l2d_topology" devices="google.com/tpu: $_l2d_chips" is_tpu=true
  source launch/flags.sh tpu
fi
for word in JAX_PLATFORMS XLA_PYTHON_CLIENT_MEM_FRACTION; do
  if [[ -n ${!word-} && " ${variables[*]-}" != *" $word="* ]]; then variables=("$word=${!word}" ${variables[@]+"${variables[@]}"}); fi
done
_l2d_need kubectl

program=(python -m l2d_jax.serve "${fixed[@]}" "$@")
prices='on nodes of any price' mounted='none other' volume='none other'
if [[ -n $spot ]]; then prices=$'spot nodes alone\n        cloud.google.com/gke-spot: "true"'; fi
if [[ -n $claim ]]; then
  mounted=$'the models\n            - {name: models, mountPath: '$mount'}'
  volume=$'the models\n        - {name: models, persistentVolumeClaim: {claimName: "'$claim'"}}'
fi
text=$(<launch/deployment.yaml)
text=${text//__NAME__/$name}
text=${text//__REPLICAS__/$replicas}
text=${text//__GRACE__/$((leaving + drain + ending + 5))}
text=${text//__LEAVING__/$leaving}
text=${text//__NODES__/$nodes}
text=${text//__DEVICES__/$devices}
text=${text//__PRIVILEGED__/$is_tpu}
text=${text//__IMAGE__/$image}
text=${text//__SPOT__/$prices}
text=${text//__KEY__/$key}
text=${text//__ACCOUNT__/${account:-default}}
text=${text//__MOUNT__/$mounted}
text=${text//__VOLUME__/$volume}
text=${text//__SECRETS__/$(_l2d_secrets ${secrets[@]+"${secrets[@]}"})}
own=$(_l2d_variables "${variables[@]}")
text=${text//__VARIABLES__/${own#[}}
text=${text//__ARGUMENTS__/$(_l2d_words "${program[@]}")} # last: nothing in them is read as a name
if [[ -z $_l2d_print ]]; then
  things=("secret/$key" ${secrets[@]+"${secrets[@]/#/secret/}"})
  if [[ -n $account ]]; then things+=("serviceaccount/$account"); fi
  if [[ -n $claim ]]; then things+=("persistentvolumeclaim/$claim"); fi
  _l2d_check_cluster "${things[@]}"
fi
_l2d_submit apply "$text"
