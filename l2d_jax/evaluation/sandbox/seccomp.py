"""The system calls that isolated processes may not make, as the small program that the kernel runs at each call.

The program is a list of denied calls in classic BPF, as in linux/seccomp.h and linux/filter.h. Bubblewrap's namespaces
hold without it. It keeps an isolated process from forking, which would multiply the limits on memory and processor
time; it denies what no namespace covers (sockets of virtual machines, memory that no limit counts); and it leaves less
of the kernel open to attack.
"""

import errno
import platform
import struct

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_* of linux/audit.h

# Their numbers on x86_64 and on aarch64; None where an architecture has no such call.
_DENIED: dict[str, tuple[int, int | None]] = {
    # more processes, and namespaces of their own
    "fork": (57, None),
    "vfork": (58, None),
    "unshare": (272, 97),
    "setns": (308, 268),
    # any network, of virtual machines and of the kernel itself too
    "socket": (41, 198),
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    # the file system as it is laid out
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "fanotify_init": (300, 262),
    # memory that RLIMIT_AS does not count
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    # large and often mended parts of the kernel
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "vmsplice": (278, 75),
    "personality": (135, 92),
    "modify_ldt": (154, None),
    # the machine
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "acct": (163, 89),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "iopl": (172, None),
    "ioperm": (173, None),
    "vhangup": (153, 58),
}
_CLONE = (56, 220)
_CLONE3 = (435, 435)
_CLONE_THREAD = 0x10000
_X32 = 0x40000000  # numbers from here on are a second table of the same calls, on x86_64

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # operations of linux/bpf_common.h
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000  # SECCOMP_RET_*


def program(machine: str | None = None, *, threads: bool = True) -> bytes:
    """The filter, in the form that `bwrap --seccomp` reads.

    Args:
        machine: one of `ARCHITECTURES`; None: this machine's.
        threads: whether a process may have more than one.
    """
    machine = machine or platform.machine()
    column = list(ARCHITECTURES).index(machine)
    steps = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
    ]
    for numbers in _DENIED.values():
        number = numbers[column]
        if number is not None:
            steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERROR | errno.EPERM)]
    steps += [
        # The flags of clone3 lie in memory, which a filter cannot read: say that the kernel lacks it, so that libc uses
        # clone.
        (_EQUAL, 0, 1, _CLONE3[column]),
        (_RETURN, 0, 0, _ERROR | errno.ENOSYS),
        (_EQUAL, 0, 3, _CLONE[column]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_ANY_BIT, 1, 0, _CLONE_THREAD if threads else 0),
        (_RETURN, 0, 0, _ERROR | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)
