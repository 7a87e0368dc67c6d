"""Who runs together, as environments tell it; the mesh that programs start with."""

import http.server
import importlib.util
import signal
import subprocess
import sys
import threading

import jax
import pytest

from l2d_jax import train
from l2d_jax.config.schema import MeshConfig
from l2d_jax.distributed import runtime
from l2d_jax.distributed.cluster import find_cluster
from l2d_jax.errors import InputError
from tests.support.programs import ROOT, call, options

EXPLICIT = {"JAX_COORDINATOR_ADDRESS": "ten:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
GKE = {"TPU_WORKER_HOSTNAMES": "a,b,c", "TPU_WORKER_ID": "2", "JAX_PLATFORMS": "tpu,cpu"}


@pytest.fixture
def libtpu(monkeypatch):
    """As if it were installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name == "libtpu" else find(name))


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        (EXPLICIT, (3, 4, "ten:1234")),
        (EXPLICIT | SLURM, (3, 4, "ten:1234")),
        (EXPLICIT | {"JAX_NUM_PROCESSES": "1"}, None),
        (SLURM, (1, 2, "node[1-2]")),
        (SLURM | {"JAX_NUM_PROCESSES": "1"}, None),
        (SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
        ({"SLURM_NTASKS": "2", "SLURM_JOB_ID": "7"}, None),  # the shell of salloc, not a step
        (GKE, (2, 3, "a")),
        (GKE | {"JAX_PLATFORMS": "cpu"}, None),
        (GKE | {"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1"}, (5, 6, "a")),
        ({"TPU_SKIP_MDS_QUERY": "1"}, None),
        ({"GCE_METADATA_IP": "localhost:1"}, None),  # nothing listens
    ],
)
def test_who_runs_together(libtpu, environment, wanted):
    found = find_cluster(environment)
    assert (found and (found.index, found.count, found.place)) == wanted


def test_without_libtpu_a_pod_is_none():
    assert find_cluster(GKE) is None


@pytest.mark.parametrize(
    ("endpoints", "slices", "wanted"),
    [
        ("one:two:10.0.0.1,one:two:10.0.0.2", "", (1, 2, "10.0.0.1")),
        ("first,second", "MEGASCALE_NUM_SLICES: '2'\nMEGASCALE_SLICE_ID: '1'\n", (3, 4, "first")),
        ("first", "", None),
    ],
)
def test_a_tpu_vm_asks_the_metadata_server(libtpu, endpoints, slices, wanted):
    attributes = {"agent-worker-number": "1", "worker-network-endpoints": endpoints, "tpu-env": f"A: 'b'\n{slices}"}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            assert self.headers["Metadata-Flavor"] == "Google"
            folder, _, key = self.path.rpartition("/")
            assert folder == "/computeMetadata/v1/instance/attributes"
            self.send_response(200)
            self.end_headers()
            self.wfile.write(attributes[key].encode())

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("localhost", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found = find_cluster({"GCE_METADATA_IP": f"localhost:{server.server_port}"})
        server.shutdown()
    assert (found and (found.index, found.count, found.place)) == wanted


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"JAX_NUM_PROCESSES": None}, "go together, but JAX_NUM_PROCESSES is missing: set all three"),
        ({"JAX_COORDINATOR_ADDRESS": "ten"}, "must be host:port of process 0, got 'ten'"),
        ({"JAX_PROCESS_ID": "4"}, "JAX_PROCESS_ID must be from 0 to 3, got 4"),
        ({"JAX_PROCESS_ID": "first"}, "JAX_PROCESS_ID must be a number, got 'first'"),
    ],
)
def test_a_bad_environment_is_one_line(changes, message):
    environment = {name: value for name, value in (EXPLICIT | changes).items() if value is not None}
    with pytest.raises(InputError, match=message):
        find_cluster(environment)


def test_a_program_learns_of_a_bad_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PROCESS_ID", "0")
    assert "set all three" in call(train.main, *options(), "--workdir", tmp_path).error
    for name, value in EXPLICIT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("L2D_JAX_WAIT", "soon")
    assert (
        "L2D_JAX_WAIT must be a positive number of seconds" in call(train.main, *options(), "--workdir", tmp_path).error
    )
    assert not list(tmp_path.iterdir())


def test_a_backend_that_has_started_is_one_line(monkeypatch, capsys):
    for name, value in (EXPLICIT | {"JAX_PROCESS_ID": "1"}).items():
        monkeypatch.setenv(name, value)
    jax.devices()
    with pytest.raises(InputError, match=r"process 1 of 4 cannot join: .* must be called before"):
        runtime.start_jax(MeshConfig())
    assert "process 1 of 4, waiting for the others at ten:1234" in capsys.readouterr().out


def test_programs_run_inside_their_mesh():
    """And may start again, for another one."""
    try:
        for config in (MeshConfig(), MeshConfig(data=-1, fsdp=1)):
            mesh = runtime.start_jax(config)
            assert jax.sharding.get_mesh() == mesh
            assert jax.sharding.get_abstract_mesh().shape == mesh.shape
    finally:
        jax.set_mesh(None)


TWICE = """
import os, signal
from l2d_jax.training.preemption import Preemption
with Preemption() as preemption:
    os.kill(os.getpid(), signal.SIGTERM)
    assert preemption.reached(1)
    os.kill(os.getpid(), signal.SIGTERM)
"""


def test_a_second_sigterm_ends_the_process():
    child = subprocess.run([sys.executable, "-c", TWICE], cwd=ROOT, capture_output=True, text=True, check=False)
    assert child.returncode == -signal.SIGTERM
    assert child.stderr == "SIGTERM: saving after the step under way; another one ends at once\n"
