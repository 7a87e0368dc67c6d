"""The system calls that isolated processes may make: those of CPython, NumPy and the C library, and no others.

Each is written `name:number on x86_64:number on aarch64`, with `-` where an architecture has no such call. None of them
makes a process, locks or watches files that others read, or takes much memory that no limit counts.
"""

from typing import NamedTuple

_CALLS = """
clone:56:220 futex:202:98 mmap:9:222 madvise:28:233 fcntl:72:25 ioctl:16:29 prctl:157:167 prlimit64:302:261
socketpair:53:199 sendto:44:206 recvfrom:45:207
read:0:63 write:1:64 readv:19:65 writev:20:66 pread64:17:67 open:2:- openat:257:56 close:3:57 lseek:8:62 stat:4:-
fstat:5:80 lstat:6:- newfstatat:262:79 access:21:- faccessat:269:48 readlink:89:- readlinkat:267:78 getdents64:217:61
getcwd:79:17 dup:32:23 dup2:33:- dup3:292:24 pipe:22:- pipe2:293:59 poll:7:- ppoll:271:73 select:23:- pselect6:270:72
getsockname:51:204
brk:12:214 munmap:11:215 mprotect:10:226 mremap:25:216
rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 sigaltstack:131:132 restart_syscall:219:128
tgkill:234:131 alarm:37:- setitimer:38:103 getitimer:36:102
set_robust_list:273:99 rseq:334:293 sched_yield:24:124 sched_getaffinity:204:123 getcpu:309:168 exit:60:93
exit_group:231:94
time:201:- gettimeofday:96:169 clock_gettime:228:113 clock_getres:229:114 nanosleep:35:101 clock_nanosleep:230:115
times:100:153 getrusage:98:165
getpid:39:172 getppid:110:173 gettid:186:178 getuid:102:174 geteuid:107:175 getgid:104:176 getegid:108:177
uname:63:160 sysinfo:99:179 getrandom:318:278
"""
# Needed to start Python, to become another user, to set limits, and by bubblewrap's first process inside.
_START = """
execve:59:221 arch_prctl:158:- set_tid_address:218:96 wait4:61:260 memfd_create:319:279 setgroups:116:159
setresuid:117:147 setresgid:119:149
"""
MISSING: list[tuple[int | None, ...]] = [(332, 291)]  # statx, below `FIRST_MISSING`: the C library does without it

# The C library falls back on older calls; from here on calls are newer than those above, and have the same numbers
# everywhere. Among them is clone3, whose flags lie in memory, which a filter cannot read.
FIRST_MISSING = 424

_WHOLE = 0xFFFFFFFF


class Condition(NamedTuple):
    """A word of 32 bits of the arguments whose masked value is one of a few."""

    word: int  # 2 i is the lower half of argument i, 2 i + 1 its upper half
    values: tuple[int, ...]
    mask: int = _WHOLE


def _null(argument: int) -> tuple[Condition, Condition]:
    return Condition(2 * argument, (0,)), Condition(2 * argument + 1, (0,))


# All of a call's conditions must hold. The kernel takes each argument compared by its lower half alone as 32 bits.
_CONDITIONS: dict[str, tuple[Condition, ...]] = {
    "clone": (Condition(0, (0x3D0F00, 0x7D0F00)),),  # as glibc and musl make threads
    "futex": (Condition(2, (0, 1, 3, 4, 5, 9, 10), mask=0x7F),),  # waiting and waking, without priorities
    # Shared mappings would keep memory that they no longer map; others would lock it, or take the machine's huge pages.
    "mmap": (Condition(6, (0,), mask=0x0001 | 0x2000 | 0x40000),),  # MAP_SHARED, MAP_LOCKED, MAP_HUGETLB
    "madvise": (Condition(4, (4, 8, 14, 15)),),  # MADV_DONTNEED, _FREE, _HUGEPAGE, _NOHUGEPAGE
    # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC: no locks, leases, signals or larger pipes.
    "fcntl": (Condition(2, (0, 1, 2, 3, 4, 1030)),),
    # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
    "ioctl": (Condition(2, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),),
    "prctl": (Condition(0, (15, 16)),),  # PR_SET_NAME, PR_GET_NAME
    "prlimit64": _null(2),  # reading limits
    # asyncio wakes itself over a pair of connected streams. No message carries descriptors, and no buffer grows.
    "socketpair": (Condition(0, (1,)), Condition(2, (1,), mask=0xF)),  # AF_UNIX, SOCK_STREAM
    "sendto": _null(4),  # no address
}
_START_CONDITIONS: dict[str, tuple[Condition, ...]] = {
    "prctl": (Condition(0, (15, 16, 22, 41)),),  # PR_SET_SECCOMP, PR_SET_THP_DISABLE
    "prlimit64": (),
}


class Call(NamedTuple):
    """A system call that may be made, if its conditions hold."""

    numbers: tuple[int | None, ...]  # on x86_64 and on aarch64; None: it has no such call
    conditions: tuple[Condition, ...]


def allowed_calls(*, at_start: bool) -> dict[str, Call]:
    """The calls that a process may make, by name: until it has given up what a candidate does not need, or after."""
    conditions = _CONDITIONS | (_START_CONDITIONS if at_start else {})
    rows = (entry.split(":") for entry in (_CALLS + (_START if at_start else "")).split())
    numbers = {name: tuple(None if one == "-" else int(one) for one in pair) for name, *pair in rows}
    return {name: Call(pair, conditions.get(name, ())) for name, pair in numbers.items()}
