import errno
import importlib.util
import platform
import struct
import subprocess
import sys

import pytest

from l2d_jax.evaluation.sandbox import seccomp
from l2d_jax.evaluation.sandbox.seccomp import allowed_calls
from tests.support.programs import ROOT

ALLOW, KILL = 0x7FFF0000, 0x80000000
EPERM, ENOSYS = 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
MACHINES = list(seccomp.ARCHITECTURES)
THREAD = 0x3D0F00  # the flags of a thread of glibc's

# What no program needs, by its numbers on x86_64 and on aarch64.
DENIED = {
    "fork": (57, None), "vfork": (58, None), "clone3": (435, 435), "unshare": (272, 97), "setns": (308, 268),
    "socket": (41, 198), "sendmsg": (46, 211), "setsockopt": (54, 208), "kill": (62, 129), "ptrace": (101, 117),
    "creat": (85, None), "mkdirat": (258, 34), "mknodat": (259, 33), "linkat": (265, 37), "symlinkat": (266, 36),
    "renameat2": (316, 276), "openat2": (437, 437), "ftruncate": (77, 46), "fallocate": (285, 47),
    "setxattr": (188, 5), "fsetxattr": (190, 7), "setxattrat": (463, 463), "chmod": (90, None), "fchmod": (91, 52),
    "flock": (73, 32), "inotify_init1": (294, 26), "fanotify_init": (300, 262), "io_setup": (206, 0),
    "timer_create": (222, 107), "eventfd2": (290, 19), "epoll_create1": (291, 20), "io_uring_setup": (425, 425),
    "mlock": (149, 228), "mlockall": (151, 230), "mincore": (27, 232), "mbind": (237, 235), "shmget": (29, 194),
    "splice": (275, 76), "tee": (276, 77), "vmsplice": (278, 75), "sendfile": (40, 71), "readahead": (187, 213),
    "setpriority": (141, 140), "sched_setattr": (314, 274), "ioprio_set": (251, 30), "keyctl": (250, 219),
    "userfaultfd": (323, 282), "bpf": (321, 280), "perf_event_open": (298, 241), "seccomp": (317, 277),
    "landlock_create_ruleset": (444, 444), "process_mrelease": (448, 448), "kcmp": (312, 272), "mount": (165, 40),
    "quotactl": (179, 60), "personality": (135, 92), "uselib": (134, None), "ustat": (136, None), "sysfs": (139, None),
    "acct": (163, 89), "syslog": (103, 116), "iopl": (172, None), "modify_ldt": (154, None), "sync": (162, 81),
    "rt_sigqueueinfo": (129, 138), "membarrier": (324, 283), "remap_file_pages": (216, 234), "execveat": (322, 281),
}  # fmt: skip


def run(program: bytes, architecture: int, number: int, *arguments: int) -> int:
    """What the kernel would: the plain interpreter of the few operations that the filter has."""
    data = struct.pack("=IIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
    steps = list(struct.iter_unpack("=HBBI", program))
    place, loaded = 0, 0
    while True:
        operation, if_true, if_false, value = steps[place]
        if operation == 0x06:
            return value
        if operation == 0x20:
            [loaded], taken = struct.unpack_from("=I", data, value), None
        elif operation == 0x54:
            loaded, taken = loaded & value, None
        else:
            taken = {0x15: loaded == value, 0x35: loaded >= value}[operation]
        place += 1 + (0 if taken is None else if_true if taken else if_false)


def answers(machine, **options):
    program = seccomp.program(machine, **options)
    assert len(program) < 8 * 4096  # BPF_MAXINSNS

    def answer(name, *arguments):
        number = name if isinstance(name, int) else CALLS[name][machine]
        return run(program, seccomp.ARCHITECTURES[machine], number, *arguments)

    return answer


CALLS = allowed_calls(at_start=True)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("at_start", [True, False])
def test_nothing_is_permitted_but_what_is_listed(machine, at_start):
    answer, column = answers(machine, at_start=at_start), MACHINES.index(machine)
    listed = {call[machine] for call in allowed_calls(at_start=at_start).values() if machine in call}
    for number in range(1000):
        # No condition of the few calls that have one holds for these arguments.
        expected = {ALLOW} if number in listed else {ENOSYS} if number >= 424 else {EPERM, ENOSYS}
        assert answer(number) in expected | ({EPERM} if number in listed else set())
    denied = {name: numbers[column] for name, numbers in DENIED.items() if numbers[column] is not None}
    assert [name for name, number in denied.items() if answer(number) == ALLOW] == []
    for number in (0x40000000, 0x40000000 + listed.pop(), 2**32 - 1):
        assert answer(number) == KILL
    assert run(seccomp.program(machine, at_start=at_start), 0x40000003, 3) == KILL  # 32-bit calls of x86


@pytest.mark.parametrize("machine", MACHINES)
def test_a_candidate_may_do_less_than_the_start(machine):
    before, after = answers(machine, at_start=True), answers(machine, at_start=False)
    for name in ("execve", "setresuid", "memfd_create", "wait4"):
        assert (before(name), after(name)) == (ALLOW, EPERM)
    for call in (("prctl", 22, 2), ("prlimit64", 0, 7, 4096)):
        assert (before(*call), after(*call)) == (ALLOW, EPERM)
    assert len(allowed_calls(at_start=False)) < len(allowed_calls(at_start=True))


@pytest.mark.parametrize("machine", MACHINES)
def test_arguments_decide(machine):
    answer = answers(machine, at_start=False)
    allowed = [
        ("clone", THREAD), ("futex", 0, 128), ("futex", 0, 9 | 256), ("mmap", 0, 4096, 3, 0x22), ("madvise", 0, 0, 4),
        ("fcntl", 0, 1), ("fcntl", 0, 1030), ("ioctl", 0, 0x5401), ("prlimit64", 0, 7, 0, 2**40), ("prctl", 15),
        ("socketpair", 1, 0x80001), ("sendto", 3, 2**40, 1, 0, 0), ("read", 2**40),
    ]  # fmt: skip
    denied = [
        ("clone", 17), ("clone", THREAD | 0x10000000), ("clone", 0), ("futex", 0, 6), ("futex", 0, 13 | 128),
        ("mmap", 0, 4096, 3, 0x21), ("mmap", 0, 4096, 3, 0x23), ("mmap", 0, 4096, 3, 0x40022), ("madvise", 0, 0, 12),
        ("fcntl", 0, 6), ("fcntl", 0, 37), ("fcntl", 0, 1024), ("fcntl", 0, 1026), ("ioctl", 0, 0x5412),
        ("prlimit64", 0, 7, 2**40), ("prctl", 1), ("prctl", 22, 2), ("socketpair", 1, 2), ("socketpair", 2, 1),
        ("sendto", 3, 0, 1, 0, 2**40),
    ]  # fmt: skip
    assert [call for call in allowed if answer(*call) != ALLOW] == []
    assert [call for call in denied if answer(*call) != EPERM] == []
    assert answers(machine, at_start=False, threads=False)("clone", THREAD) == EPERM


NUMPY = "import numpy as np; a = np.random.default_rng(0).random((300, 300)); np.linalg.svd(a @ a), np.fft.fft(a)"
LOCK = "import fcntl, os; fcntl.flock(os.open('/', 0), fcntl.LOCK_SH)"


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() not in MACHINES, reason="no filter for this machine")
@pytest.mark.parametrize(("source", "ended"), [(NUMPY, 0), (LOCK, 1)], ids=["NumPy", "a lock"])
def test_a_process_under_restraint(source, ended):
    """Without bubblewrap, whose mounts hide installed packages."""
    if source == NUMPY and importlib.util.find_spec("numpy") is None:
        pytest.skip("no NumPy")
    limits = {"memory": 2**36, "cpu_seconds": 60, "threads": 2**15, "printed_bytes": 2**20}
    task = {"limits": limits, "account": None, "filter": seccomp.program(at_start=False).hex()}
    before = f"""
import ctypes
from l2d_jax.evaluation.sandbox.isolated.restraint import restrain
ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS, as bubblewrap does
restrain({task!r})
"""
    assert subprocess.run([sys.executable, "-c", f"{before}{source}"], cwd=ROOT).returncode == ended
