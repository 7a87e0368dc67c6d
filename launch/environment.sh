# shellcheck shell=bash
# The project's Python environment, for the other scripts to source:
#
#   source launch/environment.sh [EXTRAS]           of pyproject.toml, such as tpu, cuda, dev or dev,lm-eval
#
# Creates .venv in the clone (or the folder that L2D_VENV names), installs the package into it from the clone, editable,
# with the EXTRAS and at the tested versions, and puts it first on PATH. Installs nothing the second time, until
# requirements.txt, pyproject.toml or the constraints change.
# L2D_PYTHON names the interpreter to build on, or its version, such as 3.11. By default it is the first of Python 3.12, 3.13,
# 3.14 and 3.11 that works; those of pyenv count, too. Where there is none, as on the images of TPU VMs, uv fetches Python
# 3.12; pip fetches uv.
#
# Python keeps the bytecode of what it imports here, even where PYTHONDONTWRITEBYTECODE is set: without it each program
# compiles all that it imports, which takes longer than everything else that it does before it starts.

_l2d_find_python() {
  local version candidate candidates=() versions=(3.12 3.13 3.14 3.11)
  if [[ ${L2D_PYTHON:-} =~ ^3\.[0-9]+$ ]]; then versions=("$L2D_PYTHON"); fi
  for version in "${versions[@]}"; do
    candidates+=("python$version" "${PYENV_ROOT:-${HOME:-}/.pyenv}/versions/$version".*/bin/python)
  done
  case ${L2D_PYTHON:-} in
    '') candidates+=(python3) ;;
    "${versions[0]}") ;;
    *) candidates=("$L2D_PYTHON") ;;
  esac
  for candidate in "${candidates[@]}"; do
    # ensurepip is what Debian splits off into python3-venv.
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  return 1
}

# _l2d_create_venv FOLDER
_l2d_create_venv() {
  local python folder status=0
  if python=$(_l2d_find_python); then
    "$python" -m venv --clear "$1"
    return
  fi
  if [[ -z ${L2D_PYTHON:-} ]]; then
    echo "no Python from 3.11 on: fetching 3.12 with uv" >&2
    folder=$(mktemp -d) || return
    python3 -m pip install --quiet --quiet --no-input --disable-pip-version-check --target "$folder" uv \
      && "$folder/bin/uv" venv --quiet --clear --seed --python 3.12 "$1" || status=$?
    rm -rf "$folder"
    if [[ $status == 0 ]]; then return; fi
  fi
  echo "l2d_jax needs Python 3.11 or later with its venv module: install one, or name it in L2D_PYTHON" >&2
  return 2
}

_l2d_environment() {
  local root extras=$1 venv version constraints stamp wanted
  root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd) || return
  venv=${L2D_VENV:-$root/.venv}
  [[ $venv == /* ]] || venv=$PWD/$venv

  if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    # Missing, or its interpreter has gone. Only ever clear a folder that is a virtual environment.
    if [[ -e $venv && ! -e $venv/pyvenv.cfg && -n $(ls -A "$venv") ]]; then
      echo "$venv is in the way: it is not a virtual environment" >&2
      return 2
    fi
    _l2d_create_venv "$venv" || return
  fi

  version=$("$venv/bin/python" -c 'import sys; print("%d%d" % sys.version_info[:2])') || return
  constraints=$root/launch/constraints-py$version.txt
  stamp=$venv/.installed-${extras:-plain}
  # The clone, too: an environment may serve another one than before.
  wanted=$(cat "$root"/{requirements.txt,pyproject.toml} "$root"/launch/constraints-py*.txt | cksum) || return
  wanted="$wanted $root"
  if [[ ! -e $stamp || $(<"$stamp") != "$wanted" ]]; then
    echo "installing l2d_jax${extras:+[$extras]} into $venv (some minutes the first time)" >&2
    local arguments=(--editable "$root${extras:+[$extras]}")
    if [[ -e $constraints ]]; then
      arguments+=(--constraint "$constraints")
    else
      echo "this Python is untested: there is no ${constraints##*/}; L2D_PYTHON can name another" >&2
    fi
    # uv takes a fifth of pip's time, but reads none of pip's configuration, by which a machine may have a PyTorch without
    # CUDA, or a mirror. What is imported is compiled then: most files never are.
    local pip=("$venv/bin/python" -m pip install --quiet --quiet --no-input --disable-pip-version-check --no-compile)
    if [[ $extras =~ dev|torch|lm-eval ]] || ! {
      "${pip[@]}" uv && "$venv/bin/uv" pip install --quiet --quiet --python "$venv/bin/python" "${arguments[@]}"
    }; then
      "${pip[@]}" "${arguments[@]}" || return
    fi
    echo "$wanted" >"$stamp"
  fi

  export TRANSFORMERS_NO_ADVISORY_WARNINGS=1 # "PyTorch was not found": it is not needed
  unset PYTHONDONTWRITEBYTECODE
  export VIRTUAL_ENV=$venv
  export PATH=$venv/bin:$PATH
}

_l2d_environment "${1:-}"
