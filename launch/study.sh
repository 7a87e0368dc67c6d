#!/usr/bin/env bash
# The study of docs/study.md: SmolLM2-135M-Instruct with LoRA, full finetuning and diffusion paths, and what an answer costs.
#
#   bash launch/study.sh [--base FOLDER_OR_HUB_ID_OR_GGUF] [--out DIR] [--steps N] [--answers N] [--examples N]
#                        [--rates "X ..."] [--seeds N] [--methods "NAME ..."] [--samples "N ..."] [--beams "N ..."]
#                        [--config.section.option=value ...]
#
# Each method is trained on the same examples for --steps optimizer steps (250): at the learning rates of the same small grid,
# --rates times its usual one ("0.3 1 3"), then at its best rate with --seeds seeds in all (2). The best has the lowest loss
# on the validation split; what is reported is of the test split: --answers problems answered freely (200), and --examples
# answers teacher-forced (32); --samples and --beams are the other ways to spend compute on an answer ("4 16" and "4"; "" leaves
# one out). On two cores a training takes minutes, an evaluation more: --methods takes some of
#   lora_qv lora_all full released anchored reading anchored_on_lora
# and, beside the last, lora_on_lora: a second LoRA of as many steps in place of the path.
# The same command again resumes. With no --base the model comes as a pip package.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

base='' out=runs/study steps=250 answers=200 examples=32 rates='0.3 1 3' seeds=2 overrides=()
methods='lora_qv lora_all full released anchored reading anchored_on_lora' samples='4 16' beams=4
while (($#)); do
  case $1 in
    --base) base=${2:?--base needs a folder, a hub id or a GGUF file} && shift 2 ;;
    --out) out=${2:?--out needs a folder} && shift 2 ;;
    --steps | --answers | --examples | --seeds)
      printf -v "${1#--}" '%d' "${2:?$1 needs a number}" && shift 2 ;;
    --rates) rates=${2:?--rates needs factors} && shift 2 ;;
    --methods) methods=${2:?--methods needs names} && shift 2 ;;
    --samples | --beams) printf -v "${1#--}" '%s' "${2?$1 needs numbers}" && shift 2 ;;
    --config.*) overrides+=("$1") && shift ;;
    *)
      echo "unknown argument $1; see the head of $0" >&2
      exit 2
      ;;
  esac
done

source launch/environment.sh
export TPU_SKIP_MDS_QUERY=1 # no cloud to ask on a laptop
source launch/flags.sh auto # on CPUs, training is nearly half as fast again
if [[ -z $base ]]; then
  source launch/smollm2.sh
  base=$L2D_JAX_SMOLLM2
else
  overrides+=(--config.model.architecture=None) # the config describes SmolLM2
fi
overrides+=("--config.train.steps=$steps" --config.validation.exact_examples=0)

# The variants of a method, its usual rate, and its other options. LoRA on all layers has as many parameters as a path.
describe() {
  case $1 in
    lora_qv) echo quickstart,lora 1e-3 ;;
    lora_all | lora_on_lora)
      echo quickstart,lora 1e-3 --config.lora.rank=37 --config.lora.alpha=74 \
        '--config.lora.modules=("q_proj","k_proj","v_proj","o_proj","gate_proj","up_proj","down_proj")' ;;
    full) echo quickstart,full 1e-4 ;;
    released) echo quickstart 3e-3 --config.path.start=released --config.train.own_estimates=0 ;;
    anchored | anchored_on_lora) echo quickstart 1.5e-3 ;;
    reading) echo quickstart 1.5e-3 --config.path.reader=path ;;
    *)
      echo "unknown method $1; see the head of $0" >&2
      return 2
      ;;
  esac
}

# train METHOD FACTOR SEED: one run, in $out/METHOD-FACTOR-SEED.
train() {
  local method=$1 factor=$2 seed=$3 model=$base described variants rate others
  described=$(describe "$method") || return
  read -r variants rate others <<<"$described"
  if [[ $method == *_on_lora ]]; then model=$out/$(best lora_all)/export; fi
  rate=$(python -c "print($rate * $factor)")
  # shellcheck disable=SC2086 # the other options are words
  python -m l2d_jax.train --config "smollm2_135m:$variants" --workdir "$out/$method-$factor-$seed" \
    "--config.model.name=$model" "--config.optim.peak_rate=$rate" "--config.optim.final_rate=$(python -c "print($rate / 30)")" \
    "--config.train.seed=$seed" --config.validation.budgets=1,3 $others ${overrides[@]+"${overrides[@]}"}
}

# best METHOD: the run of seed 0 whose last validation has the lowest loss, of a path at a budget of 3.
best() {
  python - "$out" "$1" "$rates" <<'PY'
import sys
from pathlib import Path
from l2d_jax.training.metrics import read_metrics

def loss(run):
    *_, last = (record for record in read_metrics(Path(out) / run) if "validation/loss" in record)
    return last.get("validation/loss@3", last["validation/loss@1"])

out, method, rates = sys.argv[1:]
print(min((f"{method}-{rate}-0" for rate in rates.split()), key=loss))
PY
}

models=("lm=$base")
for method in $methods; do
  for factor in $rates; do train "$method" "$factor" 0; done
  chosen=$(best "$method")
  echo "$method: $chosen has the lowest loss"
  for ((seed = 0; seed < seeds; seed++)); do
    train "$method" "$(cut -d- -f2 <<<"$chosen")" "$seed"
    models+=("${method}_$seed=$out/${chosen%-0}-$seed")
  done
done

# shellcheck disable=SC2086 # several numbers each
python -m l2d_jax.study --config smollm2_135m:quickstart --out "$out" --split test --budgets 1 3 7 15 \
  --answers "$answers" ${samples:+--samples $samples} ${beams:+--beams $beams} ${overrides[@]+"${overrides[@]}"} \
  "--config.data.validation_examples=$examples" --models "${models[@]}"
