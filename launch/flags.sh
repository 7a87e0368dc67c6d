# shellcheck shell=bash
# The environment variables that matter to a run, for the other scripts, or for a shell, to source:
#
#   source launch/flags.sh tpu|cuda|cpu|auto
#
# auto is cpu where there is no accelerator, and sets nothing where there is one. What is already set stays as it is.
# On other machines, pod.sh and gke.sh set a variable by --env NAME=VALUE.
#
# JAX_PLATFORMS
#   The devices to use; JAX fails if they do not answer. If it is unset, JAX goes on with the CPUs, and a slice whose TPUs
#   another process holds trains on without a word, far too slowly.
#
# JAX_COMPILATION_CACHE_DIR
#   Where compiled programs are kept for the next start; by default ~/.cache/l2d_jax/compiled, which is gone with its
#   machine. For a slice, name a folder of a bucket, gs://BUCKET/compiled: one host writes it, all hosts read it,
#   and the slice that replaces a preempted one does not compile again. (JAX trusts what it finds there: keep it private.)
#
# LIBTPU_INIT_ARGS
#   XLA's options for TPUs, such as LIBTPU_INIT_ARGS="--xla_tpu_enable_latency_hiding_scheduler=true". Left alone here:
#   what lets FSDP gather the next weights while it multiplies by the last ones is on by itself,
#     --xla_tpu_enable_latency_hiding_scheduler         orders the operations so that transfers begin early
#     --xla_enable_async_all_gather, --xla_enable_async_collective_permute
#     --xla_tpu_overlap_compute_collective_tc, --xla_tpu_enable_async_collective_fusion
#     --xla_tpu_enable_async_collective_fusion_fuse_all_gather, --xla_tpu_enable_async_collective_fusion_multiple_steps
#   (libtpu 0.0.42.1 and 0.0.51: with =true, an FSDP program for v5e compiles to what it is without; not with =false.)
#     --xla_tpu_scoped_vmem_limit_kib                   on-chip memory of one fusion: training sets it itself
#   An unknown flag ends the process at once, with the nearest name.
#
# TPU_SKIP_MDS_QUERY
#   With 1, libtpu and JAX do not ask the cloud's metadata server who and where they are. For machines outside of the
#   cloud; never on a TPU VM, whose hosts find one another through it. (GKE tells its pods by other variables.)
#
# XLA_PYTHON_CLIENT_MEM_FRACTION
#   The share of a GPU's memory that JAX takes at its start, 0.75 by default. A run that has the GPU to itself can use more:
#   CUDA's libraries need some hundred megabytes.
#
# XLA_FLAGS
#   For GPUs, the options that let a pass over all layers start as one graph of kernels instead of kernel after kernel. An
#   evaluation of Llama 1B takes 1.23 instead of 1.38 ms on an H200. Options that are already in XLA_FLAGS are kept, and none
#   is added if they say something of command buffers.
#
# MALLOC_ARENA_MAX, MALLOC_MMAP_MAX_, MALLOC_TRIM_THRESHOLD_
#   These are glibc's, and serve runs on CPUs: a step's temporary arrays stay with the process, so that the next step does
#   not wait for the kernel to hand them out anew, page by page, filled with zeros. Training on two cores is 10 to 40 %
#   faster, and takes up to 1.7 times the memory, which goes back when the process ends. (There is one arena, because the
#   others return every large array.)
#
# GLIBC_TUNABLES
#   glibc.malloc.hugetlb=1 asks Linux for large pages, which it gives where /sys/kernel/mm/transparent_hugepage/enabled is
#   "madvise" or "always": an evaluation of a decoder, which reads all weights, looks up fewer addresses.

case ${1:-} in
  tpu)
    export JAX_PLATFORMS=${JAX_PLATFORMS:-tpu,cpu}
    ;;
  cuda)
    export JAX_PLATFORMS=${JAX_PLATFORMS:-cuda,cpu}
    export TPU_SKIP_MDS_QUERY=${TPU_SKIP_MDS_QUERY:-1}
    export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}
    if [[ ${XLA_FLAGS:-} != *xla_gpu_enable_command_buffer* ]]; then
      graphs=FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,WHILE,DYNAMIC_SLICE_FUSION
      export XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_enable_command_buffer=$graphs --xla_gpu_graph_min_graph_size=1"
      unset graphs
    fi
    ;;
  cpu)
    export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu}
    export TPU_SKIP_MDS_QUERY=${TPU_SKIP_MDS_QUERY:-1}
    export MALLOC_ARENA_MAX=${MALLOC_ARENA_MAX:-1}
    export MALLOC_MMAP_MAX_=${MALLOC_MMAP_MAX_:-0}
    export GLIBC_TUNABLES=${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}
    export MALLOC_TRIM_THRESHOLD_=${MALLOC_TRIM_THRESHOLD_:-1000000000000}
    ;;
  auto)
    # NVIDIA's first GPU, and a TPU under its older and its newer driver
    # shellcheck source=/dev/null
    [[ -e /dev/nvidia0 || -e /dev/accel0 || -e /dev/vfio/0 ]] || source "${BASH_SOURCE[0]}" cpu
    ;;
  *)
    echo "flags.sh takes tpu, cuda, cpu or auto, got '${1:-}'" >&2
    return 2
    ;;
esac
