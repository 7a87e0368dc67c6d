"""The scripts for clouds, end to end: a gcloud and a kubectl that run programs on this machine, and kill them once."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from l2d_jax.training.metrics import read_metrics
from tests.support.programs import ROOT, SMALLER

SECRET = "hf_a_token_that_nobody_must_see"
STEPS = 6
TRAIN = ["train", "--config", "configs/tiny.py", f"--config.train.steps={STEPS}", "--config.train.checkpoint_every=1"]
TRAIN += [f"--config.{name}={value}" for name, value in SMALLER.items()]
TRAIN += ["--config.validation.budgets=(1,)"]

# once COMMAND [ARGUMENT ...]: the first time, all processes of the command are killed when it has saved something.
ONCE = """#!/bin/bash
if [ -e "$CLOUD/killed" ]; then exec "$@"; fi
setsid "$@" &
until compgen -G "$CLOUD/shared/run/checkpoints/*/manifest.json" >/dev/null || ! kill -0 $! 2>/dev/null; do
  /usr/bin/sleep 0.05
done
kill -KILL -- "-$!" && touch "$CLOUD/killed"
wait $! 2>/dev/null
"""

# A slice is a folder, which is gone when its program has been killed.
GCLOUD = """#!/bin/bash
echo "$*" >>"$CLOUD/calls"
case "$*" in
  "secrets versions access projects/p/secrets/hf/versions/latest") cat "$CLOUD/secret" ;;
  *" queued-resources create "*) mkdir "$CLOUD/host" ;;
  *" queued-resources describe "*) echo ACTIVE ;;
  *" queued-resources delete "*) rm -rf "$CLOUD/host" ;;
  *" tpu-vm describe "*) if [ -e "$CLOUD/killed" ]; then echo PREEMPTED; else echo READY; fi ;;
  *" tpu-vm scp "*) cp "$5" "$CLOUD/host/${6#*:}" ;;
  *" tpu-vm ssh "*)
    words=$* && words=${words##*--command=}
    cd "$CLOUD/host" && case $words in
      *" train "*) once bash -c "$words" ;;
      *) bash -c "$words" ;;
    esac ;;
esac
"""

# The Python of an old image: it has pip, whose uv makes an environment on the Python of the tests.
OLD_PYTHON = """#!/bin/bash
case "$*" in
  "-m pip install "*" --target "*" uv")
    mkdir "${*: -2:1}/bin"
    cp "$CLOUD/bin/fake_uv" "${*: -2:1}/bin/uv" ;;
  *) exit 1 ;;
esac
"""
UV = """#!/bin/bash
[[ "$1 $*" == "venv "*" --seed --python 3.12 "* ]] || exit 1
mkdir -p "${*: -1}/bin" && touch "${*: -1}/pyvenv.cfg" && cp "$CLOUD/bin/venv_python" "${*: -1}/bin/python"
"""
VENV_PYTHON = f"""#!/bin/bash
if [[ "$1 $2" == "-m pip" ]]; then echo "$*" >>"$CLOUD/pip" && exit; fi
if [[ $1 == -m ]]; then echo "$HF_TOKEN" >>"$CLOUD/tokens"; fi
exec {sys.executable} "$@"
"""

# What GKE does with a JobSet of one pod, whose volume is a folder here, until it succeeds or has failed.
KUBECTL = f"""#!{sys.executable}
import json, os, subprocess, sys, yaml
cloud = os.environ["CLOUD"]
if sys.argv[1] == "get":
    sys.exit()
spec = yaml.safe_load(sys.stdin)["spec"]
job = spec["replicatedJobs"][0]["template"]["spec"]
pod = job["template"]["spec"]
[container] = pod["containers"]
environment = {{entry["name"]: entry["value"].replace("$$", "$") for entry in container["env"]}}
for source in container["envFrom"]:
    environment["HF_TOKEN"] = open(cloud + "/" + source["secretRef"]["name"]).read()
command = [word.replace("$$", "$") for word in container["command"]]
[claim] = [volume for volume in pod["volumes"] if "persistentVolumeClaim" in volume]
[mount] = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == claim["name"]]
command = [word.replace(mount + "/", cloud + "/shared/") for word in command]
for attempt in range(1 + spec["failurePolicy"]["maxRestarts"]):
    status = subprocess.run(["once", *command], env={{**os.environ, **environment}}).returncode
    if status in (0, 2):
        break
print(f"{{attempt + 1}} attempts, the last with status {{status}}")
"""


@pytest.fixture
def cloud(tmp_path):
    """Runs a script of a clone in a cloud of folders; its output, and that folder."""
    for name in ("launch", "l2d_jax", "configs"):
        shutil.copytree(ROOT / name, tmp_path / "clone" / name)
    for name in ("requirements.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / "clone")
    tools = {"once": ONCE, "gcloud": GCLOUD, "kubectl": KUBECTL, "python3": OLD_PYTHON, "venv_python": VENV_PYTHON}
    tools |= {f"python3.{minor}": "#!/bin/bash\nexit 1\n" for minor in (11, 12, 13, 14)}
    tools |= {"python": f'#!/bin/bash\nexec {sys.executable} "$@"\n', "fake_uv": UV}
    tools |= dict.fromkeys(("sudo", "sleep"), "#!/bin/bash\n")
    (tmp_path / "bin").mkdir()
    for name, text in tools.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "shared").mkdir()

    def run(script, *arguments):
        environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "CLOUD": str(tmp_path)}
        environment["PYENV_ROOT"] = "/nowhere"  # the image has no other Python
        environment = {name: value for name, value in environment.items() if name not in ("L2D_VENV", "PYTHONPATH")}
        command = ["bash", str(tmp_path / "clone" / "launch" / script), *arguments]
        done = subprocess.run(
            command, env=environment, cwd=tmp_path / "clone", capture_output=True, text=True, check=False
        )
        return done, tmp_path

    return run


def check_that_it_resumed(done, folder: Path):
    """The program was killed once, went on from a checkpoint, and no step is missing or there twice."""
    assert done.returncode == 0, done.stderr
    assert (folder / "killed").exists()
    assert re.search(r"resuming after step \d+", done.stdout + done.stderr)
    steps = [record["step"] for record in read_metrics(folder / "shared" / "run") if "loss" in record]
    assert steps == list(range(1, STEPS + 1))
    assert (folder / "shared" / "run" / "export").is_dir()
    assert SECRET not in done.stdout + done.stderr


@pytest.mark.slow
def test_a_slice_that_was_taken_away_is_replaced_and_resumes(cloud, tmp_path):
    place = ["s1", "--zone", "z", "--type", "v6e-1"]
    for words in (["create", *place], ["install", *place[:3]]):
        done, _ = cloud("pod.sh", *words)
        assert done.returncode == 0, done.stderr
    options = ["--secret", "HF_TOKEN=projects/p/secrets/hf", "--before", 'touch "$CLOUD/mounted"', "--retry"]
    options += ["--env", "JAX_PLATFORMS=cpu", "--env", "TPU_SKIP_MDS_QUERY=1"]
    done, folder = cloud("pod.sh", "run", *place, *options, *TRAIN, "--workdir", str(tmp_path / "shared" / "run"))
    check_that_it_resumed(done, folder)
    assert "s1 was taken away: asking for another" in done.stderr
    assert (folder / "mounted").exists()
    assert (folder / "tokens").read_text().splitlines() == [SECRET] * 2
    calls = (folder / "calls").read_text()
    assert (calls.count(" create "), calls.count(" scp "), calls.count("--install")) == (2, 2, 2)
    assert SECRET not in calls
    assert (folder / "pip").read_text().count(f"--editable {folder}/host/l2d_jax[tpu,gcs]") == 2


@pytest.mark.slow
def test_a_job_that_was_killed_resumes(cloud):
    options = ["r1", "--type", "v6e-1", "--image", "i", "--volume", "disk", "--secret", "secret"]
    options += ["--env", "JAX_PLATFORMS=cpu", "--env", "TPU_SKIP_MDS_QUERY=1"]
    done, folder = cloud("gke.sh", "jobset", *options, *TRAIN, "--workdir", "/mnt/shared/run")
    check_that_it_resumed(done, folder)
    assert "2 attempts, the last with status 0" in done.stdout
