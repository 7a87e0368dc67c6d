"""Several processes as one program: how they connect, who decides, who reads first, and how they end.

With one process, every function here is an ordinary call. With several, all of them must call it, in the same order.
Only process 0 writes, and it makes the decisions that depend on files of the workdir, which all processes share. The
first process *of each host* downloads and converts files that may be on disks which hosts do not share.

If a process dies, the others end too: immediately on CPUs, or if it was process 0; otherwise after JAX has heard
nothing from it for `L2D_JAX_HEARTBEAT` seconds (60). JAX aborts them from C++, with a stack trace and status 134. The
line that says what to do is printed by a child process that outlives them (`_last_words`).
"""

import json
import os
import socket
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from tqdm import tqdm

from l2d_jax.distributed.cluster import Cluster
from l2d_jax.errors import LONGEST_LINE, InputError, SharedError, shorten
from l2d_jax.files import explained

T = TypeVar("T")
WAIT = ("L2D_JAX_WAIT", 300)  # seconds after which a process stops waiting for the others
HEARTBEAT = ("L2D_JAX_HEARTBEAT", 60)  # seconds of silence after which a process counts as dead
_AFTERWARDS = 'trap "" HUP INT TERM; read -r fine || echo "$0" >&2'  # script of the shell that outlives an abort
_messenger: subprocess.Popen[bytes] | None = None


def join(cluster: Cluster) -> None:
    """Connect to the other processes within `L2D_JAX_WAIT` seconds, or end with status 2; raises `InputError`."""
    index, count, place = cluster.index, cluster.count, cluster.place
    wait, heartbeat = (_seconds(*option) for option in (WAIT, HEARTBEAT))
    if index == 0 and "coordinator_address" in cluster.arguments:
        _require_free_port(place)
    print(f"process {index} of {count}, waiting for the others at {place}", flush=True)
    _last_words(f"error: process {index} of {count} has ended before its work was done")
    watchdog = threading.Timer(wait, _give_up, [cluster, wait])  # JAX's own time-out aborts with a stack trace
    watchdog.daemon = True
    watchdog.start()
    try:
        times: dict[str, Any] = {"initialization_timeout": wait + 60, "heartbeat_timeout_seconds": heartbeat}
        jax.distributed.initialize(**cluster.arguments, **times)
    except RuntimeError as error:
        raise InputError(f"process {index} of {count} cannot join: {error}") from error
    finally:
        watchdog.cancel()


def is_first() -> bool:
    """Whether this is process 0, the only one that writes."""
    return jax.process_index() == 0


def print_once(line: str) -> None:
    """Print a line, on process 0 alone."""
    if is_first():
        print(line, flush=True)


def progress_bar(
    total: float | int, what: str, *, done: int = 0, unit: str = "it", bar_format: str | None = None
) -> Any:
    """A progress bar with an estimate of the remaining time; shown only on a terminal and by process 0.

    `bar_format` is that of tqdm; None: its usual one.
    """
    off = not is_first() or None
    return tqdm(total=total, initial=done, desc=what, unit=unit, disable=off, bar_format=bar_format)


def decide(function: Callable[[], Any]) -> Any:
    """Call `function` on process 0 and return its result, which JSON must be able to hold, on every process.

    If it raises `InputError`, all processes raise `SharedError`.
    """
    if jax.process_count() == 1:
        return function()
    text = everywhere(lambda: json.dumps(function()).encode() if is_first() else b"")
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    return json.loads(multihost_utils.broadcast_one_to_all(np.frombuffer(text.ljust(size), np.uint8)).tobytes())


def gather_array(array: Any) -> np.ndarray:
    """Gather an array that is sharded over processes, on every process."""
    return np.asarray(array if jax.process_count() == 1 else multihost_utils.process_allgather(array, tiled=True))


def everywhere(function: Callable[[], T], *, where: str = "") -> T:
    """Call `function` on every process. If one raises `InputError`, all raise `SharedError`, with `where` in front."""
    problem = ""
    try:
        result = function()
    except InputError as error:
        problem = where + str(error)
    if jax.process_count() > 1:
        text = np.frombuffer(shorten(problem, LONGEST_LINE).encode()[:LONGEST_LINE].ljust(LONGEST_LINE), np.uint8)
        texts = [row.tobytes().decode(errors="ignore").strip() for row in multihost_utils.process_allgather(text)]
        problem = problem or next(filter(None, texts), "")
    if problem:
        raise SharedError(problem)
    return result


def take_turns(function: Callable[[], Any]) -> Any:
    """Call `function` on the first process of each host, then on the others; errors are shared as in `everywhere`."""
    if jax.process_count() == 1:
        return function()
    names = multihost_utils.process_allgather(np.uint32(zlib.crc32(socket.gethostname().encode()))).tolist()
    first = names.index(names[jax.process_index()]) == jax.process_index()
    early = everywhere(lambda: function() if first else None)
    late = everywhere(lambda: None if first else function())
    return early if first else late


def leave(status: int, *, together: bool) -> None:
    """End this process, one of several. If all end `together`, wait for the others; otherwise end immediately."""
    if not jax.distributed.is_initialized() or _messenger is None:
        return
    if together:
        multihost_utils.sync_global_devices("leave")  # process 0 may write for longer than JAX's shutdown waits
        _say_fine()
        jax.distributed.shutdown()
        return
    if status != 1:  # for other statuses the reason was already printed
        _say_fine()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _seconds(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdigit() or int(text) == 0:
        raise InputError(f"{name} must be a positive number of seconds, got {text!r}: change or unset it")
    return int(text)


def _require_free_port(address: str) -> None:
    """Raise `InputError` if another program uses the port: JAX would crash, or share it with a running program."""
    port, both = int(address.rsplit(":", 1)[1]), socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    with explained(f"port {port} of JAX_COORDINATOR_ADDRESS {address} cannot be used", "choose another everywhere"):
        socket.create_server(("", port), family=family, dualstack_ipv6=both).close()


def _give_up(cluster: Cluster, wait: int) -> None:
    """In a thread: end this process, which has waited too long. The others cannot be informed."""
    _say_fine()
    problem = f"process {cluster.index} of {cluster.count} has waited {wait} s at {cluster.place}, and not all"
    remedy = "run the same command on all workers at once, and let them reach that address"
    line = f"error: {problem} {cluster.count} came: {remedy} ({WAIT[0]}=SECONDS waits longer)"
    print(line, file=sys.stderr, flush=True)
    os._exit(2)


def _last_words(line: str) -> None:
    """Let a child print a line if this process ends before `_say_fine`: no handler survives an abort or SIGKILL."""
    global _messenger
    advice = "see the lines above and those of the other processes, fix what they report, and run the same command"
    goes_on = "on all workers again, which goes on from the newest checkpoint"
    command = ["/bin/sh", "-c", _AFTERWARDS, f"{line}: {advice} {goes_on}"]
    _messenger = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def _say_fine() -> None:
    global _messenger
    if _messenger is not None:
        _messenger.communicate(b"fine\n")
        _messenger = None
