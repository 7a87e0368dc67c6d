#!/usr/bin/env bash
# The study of docs/study.md: what LoRA, full finetuning, a diffusion path, and a path on top of LoRA make of SmolLM2-135M-Instruct.
# All are trained on the same examples and measured on the same held-out answers, the paths with every solver.
#
#   bash launch/study.sh [--base FOLDER_OR_HUB_ID_OR_GGUF] [--out DIR] [--steps N] [--examples N]
#                        [--config.section.option=value ...]
#
# --steps are optimizer steps of each method (250), --examples held-out answers (32). More of both for a night or a GPU. The same
# command again resumes. With no --base the model comes as a pip package.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

base='' out=runs/study steps=250 examples=32 overrides=()
while (($#)); do
  case $1 in
    --base) base=${2:?--base needs a folder, a hub id or a GGUF file} && shift 2 ;;
    --out) out=${2:?--out needs a folder} && shift 2 ;;
    --steps) steps=${2:?--steps needs a number} && shift 2 ;;
    --examples) examples=${2:?--examples needs a number} && shift 2 ;;
    --config.*) overrides+=("$1") && shift ;;
    *)
      echo "unknown argument $1; see the head of $0" >&2
      exit 2
      ;;
  esac
done

source launch/environment.sh
export TPU_SKIP_MDS_QUERY=1 # no cloud to ask on a laptop
if [[ -z $base ]]; then
  source launch/smollm2.sh
  base=$L2D_JAX_SMOLLM2
else
  overrides+=(--config.model.architecture=None) # the config describes SmolLM2
fi
overrides+=("--config.train.steps=$steps")

train() {
  local name=$1 model=$2 variants=$3
  shift 3
  python -m l2d_jax.train --config "configs/smollm2_135m.py:$variants" --workdir "$out/$name" "--config.model.name=$model" \
    ${overrides[@]+"${overrides[@]}"} "$@"
}

# The paper's rate of 1e-5 is for 28,000 steps; these are for hundreds, as is the quickstart's of 3e-3 for a path (the paper: 1e-4).
train lora "$base" quickstart,lora --config.optim.peak_rate=1e-3 --config.optim.final_rate=1e-5
train full "$base" quickstart,full --config.optim.peak_rate=1e-4 --config.optim.final_rate=1e-6
train l2d "$base" quickstart
train l2d_on_lora "$out/lora/export" quickstart

python -m l2d_jax.study --config configs/smollm2_135m.py:quickstart --out "$out" --solvers midpoint euler rk4 fehlberg2 \
  --split test ${overrides[@]+"${overrides[@]}"} "--config.data.validation_examples=$examples" \
  --models "base=$base" "lora=$out/lora" "full=$out/full" "l2d=$out/l2d" "l2d_on_lora=$out/l2d_on_lora"
