# shellcheck shell=bash
# What a TPU type such as v5litepod-16 stands for, for the other scripts to source. v5litepod and v6e count chips, v4 and
# v5p count cores, two to a chip. A host has four chips.
#
#   _l2d_slice TYPE     sets _l2d_runtime, _l2d_accelerator, _l2d_topology, _l2d_chips (of a host) and _l2d_hosts
#
# The runtime is the image of TPU VMs; accelerator and topology are the labels of GKE's nodes.

_l2d_slice() {
  local flat="1:1x1 4:2x2 8:2x4 16:4x4 32:4x8 64:8x8 128:8x16 256:16x16"
  local cubic="8:2x2x1 16:2x2x2 32:2x2x4 64:2x4x4 128:4x4x4 256:4x4x8 512:4x8x8 1024:8x8x8 2048:8x8x16 4096:8x16x16"
  local sizes size known=''
  case $1 in
    v4-*) _l2d_runtime=tpu-ubuntu2204-base _l2d_accelerator=tpu-v4-podslice sizes=$cubic ;;
    v5p-*) _l2d_runtime=v2-alpha-tpuv5 _l2d_accelerator=tpu-v5p-slice sizes=$cubic ;;
    v5litepod-*) _l2d_runtime=v2-alpha-tpuv5-lite _l2d_accelerator=tpu-v5-lite-podslice sizes=$flat ;;
    v6e-*) _l2d_runtime=v2-alpha-tpuv6e _l2d_accelerator=tpu-v6e-slice sizes=$flat ;;
    *) _l2d_refuse "no TPU type '$1': choose v5litepod-N, v6e-N, v5p-N or v4-N, such as v5litepod-16" ;;
  esac
  _l2d_topology=''
  for size in $sizes; do
    if [[ ${size%:*} == "${1#*-}" ]]; then _l2d_topology=${size#*:}; fi
    known+=" ${size%:*}"
  done
  [[ -n $_l2d_topology ]] || _l2d_refuse "no TPU type '$1': N is one of$known"
  local chips=$((${_l2d_topology//x/*}))
  _l2d_chips=$((chips < 4 ? chips : 4))
  # Read by the scripts that source this file.
  # shellcheck disable=SC2034
  _l2d_hosts=$((chips / _l2d_chips))
}
