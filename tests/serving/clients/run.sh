#!/usr/bin/env bash
# Tests the server with the clients that people use, as they are, each in an environment of its own:
#
#   bash tests/serving/clients/run.sh [CLIENT ...]      such as litellm or node; by default all
#
# versions.txt and package.json name their versions. The environments are made in runs/clients the first time. The server
# has a tiny model. Node's clients are left out where there is no npm.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

here=tests/serving/clients
folder=$PWD/runs/clients
mkdir -p "$folder"
source launch/environment.sh dev
source launch/flags.sh cpu
export JAX_PLATFORMS=cpu XLA_FLAGS="--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"

python -m tests.serving.clients.server >"$folder/address" &
server=$!
trap 'kill "$server"; wait "$server" || true' EXIT
until [[ -s $folder/address ]]; do
  kill -0 "$server" # it has failed, and has said why
  sleep 0.5
done
L2D_SERVER=$(<"$folder/address")
export L2D_SERVER

is_wanted() { [[ -z $wanted || " $wanted " == *" $1 "* ]]; }
wanted=$* failed=()

while read -r package file; do
  name=${package%%[=[]*}
  if [[ $package == '#'* ]] || ! is_wanted "$name"; then continue; fi
  venv=$folder/$name stamp=$folder/$name/.installed
  if [[ ! -e $stamp || $(<"$stamp") != "$package" ]]; then
    python -m venv --clear "$venv"
    "$venv/bin/python" -m pip install --quiet --no-input --disable-pip-version-check --upgrade pip
    "$venv/bin/python" -m pip install --quiet --no-input --disable-pip-version-check "$package" pytest
    echo "$package" >"$stamp"
  fi
  echo "== $package"
  "$venv/bin/python" -m pytest -c "$here/alone.ini" --rootdir=. -W ignore "$here/$file" </dev/null || failed+=("$name")
done <"$here/versions.txt"

if is_wanted node && command -v npm >/dev/null; then
  mkdir -p "$folder/node"
  cp "$here/package.json" "$here/vercel.test.mjs" "$folder/node"
  npm install --prefix "$folder/node" --silent --no-audit --no-fund
  echo "== node $(node --version)"
  (cd "$folder/node" && node --test vercel.test.mjs) || failed+=(node)
fi
if ((${#failed[@]})); then
  echo "these clients failed: ${failed[*]}" >&2
  exit 1
fi
