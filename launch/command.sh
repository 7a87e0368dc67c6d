# shellcheck shell=bash
# What the scripts for TPUs share, for them to source: commands that --print shows and does not run, quoting, complaints.

_l2d_print='' # set by --print

# From bash 5.2 on, "&" in a replacement would mean the match.
shopt -u patsub_replacement 2>/dev/null || true

# The comment at the head of a script, which is its --help.
_l2d_help() {
  local line
  while IFS= read -r line; do
    case $line in
      '#!'*) ;;
      '#'*) line=${line#'#'} && echo "${line# }" ;;
      *) return 0 ;;
    esac
  done <"$1"
}

# Ends the script as bad input does: one line, status 2.
_l2d_refuse() {
  echo "error: $*" >&2
  exit 2
}

# _l2d_value OPTION [VALUE ...]: refuses an option that is the last word.
_l2d_value() {
  (($# > 1)) || _l2d_refuse "$1 needs a value (--help lists the options)"
}

# The words, quoted where a shell needs it; of --option=value the value alone.
_l2d_quote() {
  local word option between='' escape="'\\''" plain='^[A-Za-z0-9_@%+=:,./-]+$' long='^--[A-Za-z0-9._-]+='
  for word; do
    option=''
    if ! [[ $word =~ $plain ]]; then
      if [[ $word =~ $long ]]; then option=${BASH_REMATCH[0]}; fi
      word=${word:${#option}}
      word="'${word//\'/$escape}'"
    fi
    printf '%s' "$between$option$word"
    between=' '
  done
}

# _l2d_run COMMAND [ARGUMENT ...]: runs it, or shows it.
_l2d_run() {
  if [[ -n $_l2d_print ]]; then
    _l2d_quote "$@"
    echo
  else
    "$@"
  fi
}

# _l2d_need TOOL: refuses a machine without it. --print gets along without.
_l2d_need() {
  [[ -n $_l2d_print ]] || command -v "$1" >/dev/null || _l2d_refuse "$1 is not installed; --print shows what it would do"
}

# _l2d_check_program PROGRAM: refuses what is not a program of the package. A program is a module that runs as __main__.
_l2d_check_program() {
  local file known=()
  for file in l2d_jax/[a-z]*.py; do
    if grep -q '^if __name__ == "__main__":' "$file"; then
      file=${file##*/}
      known+=("${file%.py}")
    fi
  done
  for file in "${known[@]}"; do
    if [[ $file == "${1:-}" ]]; then return; fi
  done
  _l2d_refuse "no program '${1:-}': choose from ${known[*]}"
}

# _l2d_check_variable NAME=VALUE: refuses a secret, which ps and logs would show.
_l2d_check_variable() {
  [[ $1 =~ ^[A-Za-z_][A-Za-z0-9_]*= ]] || _l2d_refuse "--env takes NAME=VALUE, got '$1'"
  case ${1%%=*} in
    *TOKEN | *KEY | *SECRET* | *PASSWORD*)
      _l2d_refuse "--env would show ${1%%=*} to ps and in logs: hand it in by --secret (--help says how)" ;;
  esac
}

# _l2d_check_secret NAME=RESOURCE: a variable and what Secret Manager has for it.
_l2d_check_secret() {
  [[ $1 =~ ^[A-Za-z_][A-Za-z0-9_]*=projects/[^/[:space:]]+/secrets/[A-Za-z0-9_-]+(/versions/[A-Za-z0-9_-]+)?$ ]] \
    || _l2d_refuse "--secret takes NAME=projects/PROJECT/secrets/SECRET, got a value of another form for '${1%%=*}'"
}

# _l2d_check_workdir PATTERN COMPLAINT [ARGUMENT ...]: refuses a folder for results (--workdir, --out) that is neither in a
# bucket nor matches the pattern.
_l2d_check_workdir() {
  local pattern=$1 complaint=$2 word name=''
  for word in "${@:3}"; do
    case $word in
      --workdir=* | --out=*) name=${word%%=*} word=${word#*=} ;;
      --workdir | --out) name=$word && continue ;;
      -*) name='' ;;
    esac
    # shellcheck disable=SC2053 # a pattern
    [[ -z $name || $word == *://* || $word == $pattern ]] || _l2d_refuse "$name $word $complaint"
  done
}
