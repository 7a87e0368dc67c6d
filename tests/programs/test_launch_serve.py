"""Servers in GKE: what the script hands to kubectl, and its complaints."""

import re
import shutil
from typing import Any

import pytest
import yaml

from l2d_jax import serve
from l2d_jax.serving import process
from l2d_jax.serving.front import LIVE, READY
from tests.programs.test_launch import HOSTILE, launch

SERVER = ["gke_serve.sh", "--print", "chat", "--image", "gcr.io/p/l2d:1", "--key", "api-key"]
GPU = ["--gpu", "nvidia-l4"]


def things(*arguments: str, **variables: str) -> dict[str, Any]:
    """What the script would have kubectl apply, by kind."""
    done = launch(*SERVER, *arguments, **variables)
    assert (done.returncode, done.stderr) == (0, "")
    first, *lines, last = done.stdout.splitlines()
    assert (first, last) == ("kubectl apply --filename - <<'END'", "END")
    return {thing["kind"]: thing for thing in yaml.safe_load_all("\n".join(lines))}


def pod(*arguments: str, **variables: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A server's pod, and its container."""
    found = things(*arguments, **variables)["Deployment"]["spec"]["template"]["spec"]
    [container] = found["containers"]
    return found, container


def test_one_address_finds_all_servers():
    found = things(*GPU, "--replicas", "3")
    assert set(found) == {"Deployment", "Service", "PodDisruptionBudget"}
    assert {thing["metadata"]["name"] for thing in found.values()} == {"chat"}
    deployment, service, budget = (found[kind]["spec"] for kind in ("Deployment", "Service", "PodDisruptionBudget"))
    labels = deployment["template"]["metadata"]["labels"]
    assert labels == deployment["selector"]["matchLabels"] == service["selector"] == budget["selector"]["matchLabels"]
    assert (deployment["replicas"], budget["maxUnavailable"]) == (3, 1)
    [container] = deployment["template"]["spec"]["containers"]
    [port] = container["ports"]
    assert service["ports"] == [{"name": "http", "port": 80, "targetPort": port["name"]}]
    assert port["containerPort"] == 8000


def test_a_server_gets_its_options():
    _, container = pod(*GPU, "--drain", "90", "--", "--model", *HOSTILE)
    words = [word.replace("$$", "$") for word in container["command"]]  # Kubernetes reads "$$" as "$"
    own = ["--host", "0.0.0.0", "--port", "8000", "--drain", "90", "--allow_host", "*"]
    assert words == ["python", "-m", "l2d_jax.serve", *own, "--model", *HOSTILE]
    assert all(re.fullmatch(r"([^$]|\$\$)*", word) for word in container["command"])
    parsed = serve.make_parser().parse_args([*own, "--model", "m"])
    assert (parsed.host, parsed.port, parsed.drain, parsed.allow_host) == ("0.0.0.0", 8000, 90.0, ["*"])


def test_probes_ask_for_what_the_server_answers():
    _, container = pod(*GPU)
    paths = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    assert paths == {"startup": READY, "readiness": READY, "liveness": LIVE}
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 3600


@pytest.mark.parametrize("drain", [1, 60, 600])
def test_requests_under_way_have_the_time_that_they_may_take(drain):
    found, container = pod(*GPU, "--drain", str(drain))
    tool, leaving = container["lifecycle"]["preStop"]["exec"]["command"]
    assert tool == "sleep"
    assert found["terminationGracePeriodSeconds"] > int(leaving) + drain + 2 * process.GRACE


def test_the_key_comes_from_a_secret():
    _, container = pod(*GPU, "--secret", "hf")
    key, *_ = container["env"]
    assert key == {"name": serve.KEY, "valueFrom": {"secretKeyRef": {"name": "api-key", "key": serve.KEY}}}
    assert container["envFrom"] == [{"secretRef": {"name": "hf"}}]


def test_servers_on_gpus():
    found, container = pod("--gpu", "nvidia-h100-80gb:2", "--env", "XLA=a $b", "--spot", JAX_PLATFORMS="cpu")
    nodes = {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb", "cloud.google.com/gke-spot": "true"}
    assert (found["nodeSelector"], container["resources"]) == (nodes, {"limits": {"nvidia.com/gpu": 2}})
    assert container["securityContext"] == {"privileged": False}
    environment = {entry["name"]: entry.get("value") for entry in container["env"][1:]}
    wanted = {"JAX_PLATFORMS": "cuda,cpu", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92", "XLA": "a $$b"}
    assert environment == wanted


def test_servers_on_tpus():
    found, container = pod("--type", "v6e-4")
    nodes = {"cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice", "cloud.google.com/gke-tpu-topology": "2x2"}
    assert (found["nodeSelector"], container["resources"]) == (nodes, {"limits": {"google.com/tpu": 4}})
    assert [entry.get("value") for entry in container["env"][1:]] == ["tpu,cpu"]


def test_a_server_reads_models_from_a_volume():
    bare, container = pod(*GPU)
    assert (bare["serviceAccountName"], len(bare["volumes"]), len(container["volumeMounts"])) == ("default", 1, 1)
    found, container = pod(*GPU, "--volume", "disk", "--service-account", "l2d")
    assert found["serviceAccountName"] == "l2d"
    assert found["volumes"][1] == {"name": "models", "persistentVolumeClaim": {"claimName": "disk"}}
    assert container["volumeMounts"][1] == {"name": "models", "mountPath": "/mnt/shared"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*SERVER], "name the devices of a server: --gpu nvidia-l4, or --type v6e-4"),
        ([*SERVER, *GPU, "--type", "v6e-4"], "give one of --gpu and --type"),
        ([*SERVER, "--gpu", "l4"], "--gpu takes GKE's type"),
        ([*SERVER, "--type", "v6e-16"], "a server is on one host, and v6e-16 has 4"),
        ([*SERVER, *GPU, "--replicas", "-1"], "--replicas takes a number, got '-1'"),
        ([*SERVER, *GPU, "--drain", "0"], "--drain takes seconds, got '0'"),
        ([*SERVER, *GPU, "--env", "L2D_JAX_API_KEY=x"], "show L2D_JAX_API_KEY to ps and in logs"),
        ([*SERVER, *GPU, "--key", "Api"], "--key takes the name of one that is in the cluster, got 'Api'"),
        ([*SERVER[:5], *GPU], "--key SECRET is missing"),
        ([*SERVER, *GPU, "--", "--port=1"], "--port is set here: leave it out after --"),
        ([*SERVER, *GPU, "--model", "m"], "unknown option --model"),
        ([*SERVER, *GPU, "other"], "one NAME, got 'chat' and 'other'"),
        ([*SERVER, *GPU, "--", "two\nlines"], "control characters cannot be handed on"),
        ([SERVER[0], *SERVER[2:], *GPU], "kubectl is not installed"),
    ],
)
def test_bad_input_is_one_line(tmp_path, words, message):
    for tool in ("bash", "dirname", "grep"):  # and no kubectl
        (tmp_path / tool).symlink_to(shutil.which(tool))
    done = launch(*words, path=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert (done.stderr.startswith("error: "), done.stderr.count("\n")) == (True, 1)
    assert message in done.stderr


def test_what_a_cluster_lacks_is_bad_input(tmp_path):
    kubectl = tmp_path / "kubectl"
    lacking = 'Error from server (NotFound): secrets "api-key" not found'
    kubectl.write_text(f"#!/bin/bash\necho \"$*\" >>{tmp_path}/calls\necho '{lacking}' >&2\nexit 1\n")
    kubectl.chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    done = launch(SERVER[0], *SERVER[2:], *GPU, "--secret", "hf", "--volume", "disk", path=path)
    missing = 'error: create it in the cluster first: secrets "api-key" not found\n'
    assert (done.returncode, done.stdout, done.stderr) == (2, "", missing)
    assert (tmp_path / "calls").read_text() == "get --output=name secret/api-key secret/hf persistentvolumeclaim/disk\n"
