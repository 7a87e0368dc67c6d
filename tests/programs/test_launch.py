"""The scripts for clouds, which no test reaches: what they would run, and their complaints."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.support.programs import ROOT

SCRIPTS = sorted([*(ROOT / "launch").glob("*.sh"), ROOT / ".ci" / "run"])
HOSTILE = ["it's", 'a "b"', "$(HOME) $x `id`", "*", "back\\slash", "&", "__IMAGE__", "", "--config.a=b c"]
POD = ["pod.sh", "--print"]
PLACE = ["s1", "--zone", "us-west4-a", "--project", "p"]
GKE = ["gke.sh", "--print"]
OUTSIDE = {"TPU_SKIP_MDS_QUERY": "1"}
KEPT = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "1000000000000",
}
RETRY = ["pod.sh", "run", *PLACE, "--retry", "--type", "v6e-16"]
IMAGE = ["r1", "--type", "v6e-16", "--image", "gcr.io/p/l2d:1"]


def launch(script, *arguments, path=None, **variables):
    environment = {"PATH": path or os.environ["PATH"], "HOME": "/nowhere", **variables}
    command = [shutil.which("bash"), str(ROOT / "launch" / script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def printed(script, *arguments, **variables):
    """The commands that a script shows, in words; comments are left out."""
    done = launch(script, *arguments, **variables)
    assert (done.returncode, done.stderr) == (0, "")
    return [shlex.split(line) for line in done.stdout.splitlines() if not line.startswith("#")]


def option(words, name):
    [value] = [word.partition("=")[2] for word in words if word.startswith(f"--{name}=")]
    return value


def job(*arguments):
    """The JobSet that gke.sh hands to kubectl, and what it asks of each of its pods."""
    done = launch(*GKE, "jobset", *IMAGE, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    first, *lines, last = done.stdout.splitlines()
    assert (first, last) == ("kubectl create --filename - <<'END'", "END")
    whole = yaml.safe_load("\n".join(lines))
    [replicated] = whole["spec"]["replicatedJobs"]
    return whole, replicated["template"]["spec"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_well_formed(script):
    checker = Path(sys.executable).parent / "shellcheck"
    found = str(checker) if checker.exists() else shutil.which("shellcheck")
    subprocess.run(["bash", "-n", script], check=True)
    if found is None:
        pytest.skip("shellcheck is not installed: the extra dev has it")
    done = subprocess.run([found, "--external-sources", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("script", ["tpu_vm.sh", "pod.sh", "gke.sh", "gke_serve.sh"])
def test_help_names_every_option(script):
    done = launch(script, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    read = set(re.findall(r"(--[a-z]+)(?= \||\))", (ROOT / "launch" / script).read_text()))
    assert read
    assert read - set(re.findall(r"--[a-z]+", done.stdout)) == {"--help"}


def test_a_tpu_vm_runs_any_program():
    environment, flags, run = printed("tpu_vm.sh", "--print", "generate", "--prompt", *HOSTILE)
    assert environment == ["source", "launch/environment.sh", "tpu,gcs"]
    assert flags == ["source", "launch/flags.sh", "tpu"]
    assert run == ["exec", "python", "-m", "l2d_jax.generate", "--prompt", *HOSTILE]


def test_a_tpu_vm_is_prepared():
    commands = printed("tpu_vm.sh", "--print", "--install")
    assert [words[0] for words in commands] == ["sudo", "source"]


def test_a_tpu_vm_mounts_and_reads_secrets_first():
    given = ["--before", "mount 'a b'", "--secret", "HF_TOKEN=projects/p/secrets/hf"]
    given += ["--secret", "WANDB_API_KEY=projects/p/secrets/wb/versions/3"]
    before, *secrets, _, _, run = printed("tpu_vm.sh", "--print", *given, "train")
    assert before == ["bash", "-c", "mount 'a b'"]
    assert secrets == [
        ["export", "HF_TOKEN=$(gcloud secrets versions access projects/p/secrets/hf/versions/latest)"],
        ["export", "WANDB_API_KEY=$(gcloud secrets versions access projects/p/secrets/wb/versions/3)"],
    ]
    assert run == ["exec", "python", "-m", "l2d_jax.train"]


ON_CPUS = {"JAX_PLATFORMS": "cpu"} | OUTSIDE | KEPT
HAS_ACCELERATOR = any(Path("/dev", name).exists() for name in ("nvidia0", "accel0", "vfio/0"))


@pytest.mark.parametrize(
    ("device", "found"),
    [
        ("tpu", {"JAX_PLATFORMS": "tpu,cpu"}),
        ("cpu", ON_CPUS),
        ("auto", {} if HAS_ACCELERATOR else ON_CPUS),
        ("cuda", {"JAX_PLATFORMS": "cuda,cpu", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"} | OUTSIDE),
    ],
)
def test_flags_leave_what_is_set(device, found):
    def read(**given):
        script = f"source {ROOT}/launch/flags.sh {device} && env"
        done = subprocess.run(["bash", "-c", script], env=given, capture_output=True, text=True, check=True)
        return dict(line.split("=", 1) for line in done.stdout.splitlines())

    before = read(**dict.fromkeys(found, "mine"))
    assert {name: before[name] for name in found} == dict.fromkeys(found, "mine")
    ours = ("JAX", "TPU", "XLA", "LIBTPU", "MALLOC", "GLIBC")
    after = {name: value for name, value in read().items() if name.startswith(ours)}
    graphs = after.pop("XLA_FLAGS", "")
    assert after == found
    assert graphs.startswith(" --xla_gpu_enable_command_buffer=FUSION,") == (device == "cuda")
    if device == "cuda":
        assert read(XLA_FLAGS="--mine")["XLA_FLAGS"] == f"--mine{graphs}"
        assert read(XLA_FLAGS=graphs)["XLA_FLAGS"] == graphs
        none = "--xla_gpu_enable_command_buffer="
        assert read(XLA_FLAGS=none)["XLA_FLAGS"] == none


def test_a_slice_is_created():
    create, ask = printed(*POD, "create", *PLACE, "--type", "v5p-16", "--spot")
    assert create[:6] == ["gcloud", "compute", "tpus", "queued-resources", "create", "s1"]
    assert set(create[6:]) == {
        "--zone=us-west4-a",
        "--project=p",
        "--node-id=s1",
        "--accelerator-type=v5p-16",
        "--runtime-version=v2-alpha-tpuv5",
        "--spot",
    }
    assert option(ask, "format") == "value(state.state)"
    create, _ = printed(*POD, "create", *PLACE, "--type", "v5p-16", "--runtime", "own")
    assert (option(create, "runtime-version"), "--spot" in create) == ("own", False)


def test_all_hosts_run_the_program():
    given = "XLA=a b'c"
    [words] = printed(*POD, "run", *PLACE, "--env", given, "train", "--workdir", "/mnt/w", *HOSTILE)
    assert words[:6] == ["gcloud", "compute", "tpus", "tpu-vm", "ssh", "s1"]
    assert option(words, "worker") == "all"
    before, _, rest = option(words, "command").partition(" && mkdir -p runs && ")
    assert before == "set -o pipefail; cd l2d_jax"
    remote, _, log = rest.rpartition(" 2>&1 | ")
    assert log == "tee -p -a runs/pod.log"
    assert shlex.split(remote) == ["env", given, "bash", "launch/tpu_vm.sh", "train", "--workdir", "/mnt/w", *HOSTILE]


def test_all_hosts_mount_and_read_secrets_first():
    given = ["--before", "mount 'a b'", "--secret", "HF_TOKEN=projects/p/secrets/hf"]
    [words] = printed(*POD, "run", *PLACE, *given, "train")
    remote = option(words, "command").partition(" && mkdir -p runs && ")[2].rpartition(" 2>&1 | ")[0]
    assert shlex.split(remote) == ["env", "bash", "launch/tpu_vm.sh", *given, "train"]


@pytest.mark.parametrize(
    ("action", "tools"),
    [
        ("install", ["mkdir", "tar", "scp", "ssh"]),
        ("stop", ["ssh"]),
        ("logs", ["mkdir", "ssh"]),
        ("delete", ["delete"]),
    ],
)
def test_the_other_commands_for_a_slice(action, tools):
    commands = printed(*POD, action, *PLACE)
    assert [words[4] if words[0] == "gcloud" else words[0] for words in commands] == tools
    assert all("--zone=us-west4-a" in words for words in commands if words[0] == "gcloud")


# In place of gcloud: writes down what it is asked; a run fails as often as the file `failures` has lines,
# with the status that each line has.
GCLOUD = """#!/bin/bash
echo "$3 $4" >>calls
case "$3 $4 $*" in
  *" ssh "*tpu_vm.sh\\ train*) read -r status <failures; sed -i 1d failures; exit ${status:-0} ;;
  "queued-resources describe "*) echo ACTIVE ;;
  "tpu-vm describe "*) cat state ;;
esac
"""


@pytest.fixture
def cloud(tmp_path):
    """A clone of the scripts beside a `gcloud` and a `sleep` that take no time."""
    shutil.copytree(ROOT / "launch", tmp_path / "launch")
    (tmp_path / "l2d_jax").mkdir()
    shutil.copy(ROOT / "l2d_jax" / "train.py", tmp_path / "l2d_jax")
    (tmp_path / "bin").mkdir()
    for name, text in {"gcloud": GCLOUD, "sleep": "#!/bin/bash\n"}.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)

    def pod(*arguments, failures, state, failure=255):
        (tmp_path / "failures").write_text(f"{failure}\n" * failures)
        (tmp_path / "state").write_text(state)
        environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
        command = ["bash", str(tmp_path / "launch" / "pod.sh"), *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return done.returncode, (tmp_path / "calls").read_text().splitlines()

    return pod


AGAIN = ["tpu-vm describe", "queued-resources delete", "queued-resources create", "queued-resources describe"]


@pytest.mark.parametrize(
    ("options", "failures", "state", "status", "calls"),
    [
        ([], 0, "READY", 0, []),
        ([], 1, "PREEMPTED", 255, []),
        (["--retry", "--type", "v6e-16"], 1, "READY", 255, ["tpu-vm describe"]),
        (["--retry", "--type", "v6e-16"], 2, "", 0, [*AGAIN, "tpu-vm scp", "tpu-vm ssh", "tpu-vm ssh"] * 2),
    ],
)
def test_a_slice_that_was_taken_away_is_replaced(cloud, options, failures, state, status, calls):
    done = cloud("run", *PLACE, *options, "train", failures=failures, state=state)
    assert done == (status, ["tpu-vm ssh", *calls])


@pytest.mark.parametrize(
    ("failure", "restarts", "status", "calls"),
    [
        (1, [], 0, ["tpu-vm describe", "tpu-vm ssh"] * 2),
        (137, ["--restarts", "1"], 137, ["tpu-vm describe", "tpu-vm ssh"]),
        (2, [], 2, []),  # bad input
        (143, [], 143, ["tpu-vm describe"]),  # `stop`
    ],
)
def test_a_crash_on_a_slice_that_is_still_there(cloud, failure, restarts, status, calls):
    retry = ["--retry", "--type", "v6e-16", *restarts]
    done = cloud("run", *PLACE, *retry, "train", failures=2, failure=failure, state="READY")
    assert done == (status, ["tpu-vm ssh", *calls])


@pytest.mark.parametrize(
    ("kind", "accelerator", "topology", "hosts", "chips"),
    [
        ("v5litepod-1", "tpu-v5-lite-podslice", "1x1", 1, 1),
        ("v5litepod-16", "tpu-v5-lite-podslice", "4x4", 4, 4),
        ("v6e-256", "tpu-v6e-slice", "16x16", 64, 4),
        ("v5p-8", "tpu-v5p-slice", "2x2x1", 1, 4),
        ("v5p-128", "tpu-v5p-slice", "4x4x4", 16, 4),
        ("v4-32", "tpu-v4-podslice", "2x2x4", 4, 4),
    ],
)
def test_a_job_has_a_pod_on_each_host(kind, accelerator, topology, hosts, chips):
    _, spec = job("--type", kind, "train")
    assert (spec["parallelism"], spec["completions"], spec["completionMode"]) == (hosts, hosts, "Indexed")
    pod = spec["template"]["spec"]
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": accelerator,
        "cloud.google.com/gke-tpu-topology": topology,
    }
    [container] = pod["containers"]
    assert container["resources"] == {"limits": {"google.com/tpu": chips}}


def test_a_job_runs_the_program():
    whole, spec = job("--spot", "--restarts", "7", "--env", "XLA=a $b", "train", *HOSTILE)
    assert (whole["kind"], whole["metadata"]["name"]) == ("JobSet", "r1")
    assert whole["spec"]["failurePolicy"]["maxRestarts"] == 7
    [rule] = spec["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["values"]) == ("FailJob", [2])
    pod = spec["template"]["spec"]
    assert pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert pod["terminationGracePeriodSeconds"] == 120
    [container] = pod["containers"]
    assert container["name"] == rule["onExitCodes"]["containerName"]
    assert container["image"] == "gcr.io/p/l2d:1"
    # Kubernetes reads "$$" as "$".
    assert [word.replace("$$", "$") for word in container["command"]] == ["python", "-m", "l2d_jax.train", *HOSTILE]
    assert all(re.fullmatch(r"([^$]|\$\$)*", word) for word in container["command"])
    assert container["env"] == [{"name": "JAX_PLATFORMS", "value": "tpu,cpu"}, {"name": "XLA", "value": "a $$b"}]


def test_a_job_restarts_unless_its_input_is_bad():
    whole, spec = job("train")
    policy = whole["spec"]["failurePolicy"]
    assert (policy["maxRestarts"], policy["restartStrategy"]) == (50, "BlockingRecreate")
    [rule] = policy["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert (spec["backoffLimit"], spec["template"]["spec"]["restartPolicy"]) == (0, "Never")


def test_a_job_has_a_volume_secrets_and_an_identity():
    def pod(*arguments):
        found = job(*arguments)[1]["template"]["spec"]
        [container] = found["containers"]
        return found, container

    bare, container = pod("train", "--workdir", "gs://b/run")
    assert (bare["serviceAccountName"], bare["hostNetwork"]) == ("default", True)
    assert (container["envFrom"], len(container["volumeMounts"]), len(bare["volumes"])) == ([], 1, 1)

    given = ["--volume", "disk", "--secret", "true", "--secret", "wandb", "--service-account", "l2d"]
    found, container = pod(*given, "train", "--workdir", "/mnt/shared/run")
    assert (found["serviceAccountName"], found["hostNetwork"]) == ("l2d", False)  # the host's network has its identity
    assert container["envFrom"] == [{"secretRef": {"name": "true"}}, {"secretRef": {"name": "wandb"}}]
    assert container["volumeMounts"][1] == {"name": "workdir", "mountPath": "/mnt/shared"}
    assert found["volumes"][1] == {"name": "workdir", "persistentVolumeClaim": {"claimName": "disk"}}


def test_a_job_takes_a_variable_once():
    _, spec = job("--env", "JAX_PLATFORMS=cpu", "train")
    assert spec["template"]["spec"]["containers"][0]["env"] == [{"name": "JAX_PLATFORMS", "value": "cpu"}]


def test_what_a_cluster_lacks_is_bad_input(tmp_path):
    kubectl = tmp_path / "kubectl"
    lacking = 'Error from server (NotFound): persistentvolumeclaims "disk" not found'
    kubectl.write_text(f"#!/bin/bash\necho \"$*\" >>{tmp_path}/calls\necho '{lacking}' >&2\nexit 1\n")
    kubectl.chmod(0o755)
    given = ["--secret", "hf", "--volume", "disk", "--service-account", "l2d"]
    done = launch("gke.sh", "jobset", *IMAGE, *given, "train", path=f"{tmp_path}:{os.environ['PATH']}")
    missing = 'error: create it in the cluster first: persistentvolumeclaims "disk" not found\n'
    assert (done.returncode, done.stdout, done.stderr) == (2, "", missing)
    asked = "get --output=name secret/hf serviceaccount/l2d persistentvolumeclaim/disk\n"
    assert (tmp_path / "calls").read_text() == asked


def test_a_job_does_not_inherit_this_machines_variables():
    assert 'JAX_PLATFORMS, value: "tpu,cpu"}]' in launch(*GKE, "jobset", *IMAGE, "train", JAX_PLATFORMS="cpu").stdout


def test_xpk_runs_the_program():
    [words] = printed(*GKE, "xpk", *IMAGE, "--cluster", "c", "--zone", "z", "train", *HOSTILE)
    assert words[:3] == ["xpk", "workload", "create"]
    assert [option(words, name) for name in ("workload", "cluster", "zone", "tpu-type")] == ["r1", "c", "z", "v6e-16"]
    assert shlex.split(option(words, "command")) == ["python", "-m", "l2d_jax.train", *HOSTILE]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tpu_vm.sh"], "no program ''"),
        (["tpu_vm.sh", "trian"], "no program 'trian': choose from benchmark compile convert"),
        (["tpu_vm.sh", "config"], "no program 'config'"),
        (["tpu_vm.sh", "--instal"], "unknown option --instal"),
        (["tpu_vm.sh", "--install", "train"], "--install runs no program, got 'train'"),
        (["pod.sh", "make", *PLACE], "no command 'make': choose from create, install, run, stop, logs, delete"),
        (["pod.sh", "create", "--zone", "z", "--type", "v6e-16"], "got ''"),
        (["pod.sh", "create", "S 1", "--zone", "z"], "letters, digits and dashes, got 'S 1'"),
        (["pod.sh", "create", "s1", "--type", "v6e-16"], "create needs --zone ZONE"),
        (["pod.sh", "create", *PLACE], "create needs --type TYPE"),
        (["pod.sh", "create", *PLACE, "--type"], "--type needs a value"),
        (["pod.sh", "create", *PLACE, "--type", "v6e-17"], "no TPU type 'v6e-17': N is one of 1 4 8 16"),
        (["pod.sh", "create", *PLACE, "--type", "v99-8"], "no TPU type 'v99-8': choose v5litepod-N"),
        (["pod.sh", "run", *PLACE, "--retry", "train"], "run needs --type TYPE"),
        (["pod.sh", "run", *PLACE, "--env", "A B=c", "train"], "--env takes NAME=VALUE, got 'A B=c'"),
        (["pod.sh", "run", *PLACE], "no program ''"),
        (
            ["pod.sh", "run", *PLACE, "--env", "HF_TOKEN=hf_1", "train"],
            "show HF_TOKEN to ps and in logs: hand it in by --s",
        ),
        (["pod.sh", "run", *PLACE, "--secret", "HF_TOKEN=hf_1", "train"], "NAME=projects/PROJECT/secrets/SECRET"),
        (["pod.sh", "run", *PLACE, "--restarts", "x", "train"], "--restarts takes a number, got 'x'"),
        (
            [*RETRY, "train", "--workdir", "runs/a"],
            "--workdir runs/a would be gone with its slice: name gs://BUCKET/RUN",
        ),
        (["tpu_vm.sh", "--before"], "--before needs a value"),
        (["tpu_vm.sh", "--secret", "HF_TOKEN=x", "train"], "of another form for 'HF_TOKEN'"),
        (["pod.sh", "stop", *PLACE, "train"], "stop takes no further argument, got 'train'"),
        (["pod.sh", "delete", *PLACE], "gcloud is not installed; --print shows what it would do"),
        (["gke.sh", "jobset", *IMAGE, "train"], "kubectl is not installed"),
        (["gke.sh", "xpk", *IMAGE, "--cluster", "c", "train"], "xpk is not installed"),
        (["gke.sh", "xpk", *IMAGE, "train"], "xpk needs --cluster CLUSTER"),
        (["gke.sh", "job", *IMAGE], "no command 'job': choose from jobset, xpk"),
        (["gke.sh", "jobset", "x" * 41, *IMAGE[1:], "train"], "up to 40 small letters"),
        (["gke.sh", "jobset", *IMAGE[:3], "train"], "jobset needs --image IMAGE"),
        (["gke.sh", "jobset", *IMAGE, "--restarts", "-1", "train"], "--restarts takes a number, got '-1'"),
        (["gke.sh", "jobset", *IMAGE, "--zone", "z", "train"], "are for xpk"),
        ([*GKE, "jobset", *IMAGE, "train", "two\nlines"], "control characters cannot be handed on"),
        (["gke.sh", "jobset", *IMAGE, "--env", "WANDB_API_KEY=x", "train"], "show WANDB_API_KEY to ps and in logs"),
        (
            ["gke.sh", "jobset", *IMAGE, "--secret", "A=b", "train"],
            "--secret takes the name of one that is in the cluster",
        ),
        (
            ["gke.sh", "jobset", *IMAGE, "train", "--workdir", "runs/a"],
            "--workdir runs/a would be gone with its container",
        ),
        (["gke.sh", "jobset", *IMAGE, "train", "--workdir=gs:/b/a"], "--workdir gs:/b/a would be gone"),
        (
            ["gke.sh", "jobset", *IMAGE, "train", "--workdir", "/mnt/shared/a"],
            "a folder of /mnt/shared with --volume CLAIM",
        ),
        (["gke.sh", "jobset", *IMAGE, "--volume", "d", "evaluate", "--out", "/tmp/a"], "--out /tmp/a would be gone"),
        (["gke.sh", "jobset", *IMAGE, "report", "--workdir", "gs://b/1", "x"], "--workdir x would be gone"),
        (["gke.sh", "xpk", *IMAGE, "--cluster", "c", "--secret", "a", "train"], "--volume are for jobset"),
    ],
)
def test_bad_input_is_one_line(tmp_path, words, message):
    for tool in ("bash", "dirname", "grep"):  # and no gcloud, kubectl or xpk
        (tmp_path / tool).symlink_to(shutil.which(tool))
    done = launch(*words, path=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr


def test_the_container_file_copies_what_is_there():
    text = (ROOT / "launch" / "Containerfile").read_text()
    sources = [word for line in re.findall(r"^COPY (.*)", text, re.M) for word in line.split()[:-1]]
    assert sources
    assert all(list(ROOT.glob(source)) for source in sources)
    [default] = re.findall(r"^ARG EXTRA=(.*)", text, re.M)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(default.split(",")) <= set(extras)
    [version] = re.findall(r"^FROM python:3\.(\d+)-slim", text, re.M)
    assert f"launch/constraints-py3{version}.txt" in sources
