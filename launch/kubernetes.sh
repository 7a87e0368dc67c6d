# shellcheck shell=bash
# What the scripts for GKE share, for them to source after command.sh: names, YAML, and what a cluster must have.

# _l2d_check_name OPTION NAME: of a thing in the cluster.
_l2d_check_name() {
  [[ $2 =~ ^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$ ]] || _l2d_refuse "$1 takes the name of one that is in the cluster, got '$2'"
}

# _l2d_check_image ACTION IMAGE
_l2d_check_image() {
  [[ $2 =~ ^[A-Za-z0-9][A-Za-z0-9._:/@-]*$ ]] || _l2d_refuse "$1 needs --image IMAGE, got '$2'"
}

# A YAML string. Kubernetes reads "$" in it: two stand for one.
_l2d_yaml() {
  if [[ $1 == *[[:cntrl:]]* ]]; then _l2d_refuse "control characters cannot be handed on, got $(printf %q "$1")"; fi
  local text=${1//\\/\\\\}
  text=${text//\"/\\\"}
  printf '"%s"' "${text//\$/\$\$}"
}

# A YAML list.
_l2d_list() {
  local IFS=,
  printf '[%s]' "$*"
}

# A YAML list of words, of variables (NAME=VALUE), and of Secrets whose keys become variables.
_l2d_words() {
  local word words=()
  for word; do words+=("$(_l2d_yaml "$word")") || exit; done
  _l2d_list ${words[@]+"${words[@]}"}
}

_l2d_variables() {
  local word entries=()
  for word; do entries+=("{name: ${word%%=*}, value: $(_l2d_yaml "${word#*=}")}") || exit; done
  _l2d_list ${entries[@]+"${entries[@]}"}
}

_l2d_secrets() {
  local name entries=()
  for name; do entries+=("{secretRef: {name: \"$name\"}}"); done
  _l2d_list ${entries[@]+"${entries[@]}"}
}

# _l2d_check_cluster THING ...: refuses what the cluster lacks, such as secret/NAME: pods that name it would wait for ever,
# on nodes that cost money.
_l2d_check_cluster() {
  (($#)) || return 0
  local missing
  missing=$(kubectl get --output=name "$@" 2>&1 >/dev/null | grep --max-count=1 NotFound || true)
  [[ -z $missing ]] || _l2d_refuse "create it in the cluster first: ${missing#*: }"
}

# _l2d_submit VERB TEXT: kubectl creates or applies what the text describes; --print shows the command.
_l2d_submit() {
  if [[ -n $_l2d_print ]]; then
    printf '%s\n' "kubectl $1 --filename - <<'END'" "$2" END
  else
    kubectl "$1" --filename - <<<"$2"
  fi
}
