"""Finds out from the environment which processes run a program together, before they connect to each other.

The order is: `JAX_COORDINATOR_ADDRESS` (host:port of process 0), `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`, on any
machines; SLURM and Open MPI; TPU pods on GKE (its variables) and on TPU VMs (Google's metadata server, which is queried
only if libtpu is installed and `JAX_PLATFORMS` allows TPUs). `JAX_NUM_PROCESSES=1` keeps a process alone.

JAX detects the same clusters but does not report them. The result is needed before JAX starts, so that a single process
does not wait, and a process that waits can say for which others.
"""

import importlib.util
import re
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from l2d_jax.errors import InputError, require

EXPLICIT = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
METADATA_SECONDS = 3  # time limit for the metadata server, which is on the same machine
# The variables that a scheduler sets in each process: the number of processes, the number of this one, the hosts
# (including process 0's), and further variables by which JAX recognises the scheduler.
SCHEDULERS = (
    ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID", "SLURM_LOCALID"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_MCA_orte_hnp_uri", "OMPI_COMM_WORLD_LOCAL_RANK"),
)


@dataclass(frozen=True)
class Cluster:
    """The place of this process among several."""

    index: int
    count: int
    place: str  # address of process 0, for messages
    # Arguments of jax.distributed.initialize; if there are none, JAX reads the same environment.
    arguments: Mapping[str, Any] = field(default_factory=dict)


def find_cluster(environment: Mapping[str, str]) -> Cluster | None:
    """The processes that run together with this one, or None if it is alone; raises `InputError`."""
    if environment.get("JAX_NUM_PROCESSES") == "1":
        return None
    cluster = _explicit(environment) or _scheduled(environment) or _pod(environment)
    return cluster if cluster is not None and cluster.count > 1 else None


def _explicit(environment: Mapping[str, str]) -> Cluster | None:
    missing = [name for name in EXPLICIT if name not in environment]
    if len(missing) == len(EXPLICIT):
        return None
    require(not missing, f"{', '.join(EXPLICIT)} go together, but {' and '.join(missing)} is missing: set all three")
    address = environment["JAX_COORDINATOR_ADDRESS"]
    count, index = (_number(environment, name) for name in EXPLICIT[1:])
    if not re.fullmatch(r".+:\d+", address):
        raise InputError(f"JAX_COORDINATOR_ADDRESS must be host:port of process 0, got {address!r}: add the port")
    if not 0 <= index < count:
        raise InputError(f"JAX_PROCESS_ID must be from 0 to {count - 1}, got {index}: count the processes from 0")
    arguments = {"coordinator_address": address, "num_processes": count, "process_id": index}
    return Cluster(index, count, address, arguments | {"cluster_detection_method": "deactivate"})


def _scheduled(environment: Mapping[str, str]) -> Cluster | None:
    for names in SCHEDULERS:
        if all(name in environment for name in names):
            count, index = (_number(environment, name) for name in names[:2])
            return Cluster(index, count, environment[names[2]])
    return None


def _pod(environment: Mapping[str, str]) -> Cluster | None:
    platforms = environment.get("JAX_PLATFORMS", "")
    if (platforms and "tpu" not in platforms) or importlib.util.find_spec("libtpu") is None:
        return None
    hosts = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES")
    if hosts is not None:
        index, place, slices = _number(environment, "TPU_WORKER_ID"), hosts.split(",")[0], environment
    elif "TPU_SKIP_MDS_QUERY" in environment:
        return None
    else:
        number, hosts = (_ask(environment, key) for key in ("agent-worker-number", "worker-network-endpoints"))
        if number is None or hosts is None:
            return None
        index, place = int(number), hosts.split(",")[0].split(":")[-1]  # a name, or name:number:address
        lines = _ask(environment, "tpu-env") or ""
        slices = {**dict(re.findall(r"(?m)^(MEGASCALE_\w+):\s*'?([^'\n]*)'?\s*$", lines)), **environment}
    workers, place = len(hosts.split(",")), slices.get("MEGASCALE_COORDINATOR_ADDRESS") or place
    index += workers * int(slices.get("MEGASCALE_SLICE_ID") or 0)
    return Cluster(index, workers * int(slices.get("MEGASCALE_NUM_SLICES") or 1), place)


def _ask(environment: Mapping[str, str], key: str) -> str | None:
    """Read an attribute of this machine from Google's metadata server; None if there is no server."""
    server = environment.get("GCE_METADATA_IP", "metadata.google.internal")
    url = f"http://{server}/computeMetadata/v1/instance/attributes/{key}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=METADATA_SECONDS) as answer:
            return answer.read().decode()
    except OSError:
        return None


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    require(text.isdigit(), f"{name} must be a number, got {text!r}: set it in every process")
    return int(text)
