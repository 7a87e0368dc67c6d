"""What generated code may ask of the kernel that no function needs; see `attacks`."""

from tests.support.attacks import Attack, answering

# Calls are made by number, those of x86_64 and of aarch64, so that neither Python nor the C library is in the way.
KERNEL = """
import ctypes, os, platform
libc = ctypes.CDLL(None, use_errno=True)
def call(x86_64, aarch64, *arguments):
    number = x86_64 if platform.machine() == 'x86_64' else aarch64
    arguments = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result = libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0: raise OSError(ctypes.get_errno(), 'the kernel refuses')
    return result
"""
_DONE = "assert answer(1) >= 0"


def _asking(body: str) -> str:
    return answering(body, before=KERNEL)


def _call(name: str, arguments: str, *, bare: bool = True, reason: str = "PermissionError") -> Attack:
    """A call that returns a number; `bare` unless it needs privileges, or a kernel or container may lack it."""
    return Attack(name, _asking(f"return call({arguments})"), _DONE, bare=bare, reason=reason)


_MEMORY = [
    Attack("names of files", answering("""
        for number in range(99): open(f'{number:0>250}', 'w')
        return 42
    """), reason="Read-only file system"),
    Attack("attributes of files", answering("""
        import os
        with open('file', 'w') as file: os.setxattr(file.fileno(), 'user.name', bytes(999))
        return 42
    """), bare=False, reason="Read-only file system"),
    Attack("attributes of what it prints to", answering("import os\nos.setxattr(1, 'user.name', b'')\nreturn 42"),
           bare=False, reason="PermissionError"),
    Attack("folders and links", answering("""
        import contextlib, os
        for make in (os.mkdir, os.mkfifo, lambda name: os.symlink('x' * 999, name)):
            with contextlib.suppress(OSError): make(f'{make}'[:99].replace('/', '')); return 42
    """), reason="assertion failed"),
    Attack("datagrams that nobody reads", answering("""
        import socket
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(20)]
        for one, other in pairs: one.send(bytes(99_999))
        return 42
    """), reason="PermissionError"),
    Attack("descriptors on their way", answering("""
        import socket
        one, other = socket.socketpair()
        socket.send_fds(one, [b'x'], [one.fileno(), other.fileno()])
        return 42
    """), reason="PermissionError"),
    Attack("larger buffers of sockets", answering("""
        import socket
        one, other = socket.socketpair()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**20)
        return 42
    """), reason="PermissionError"),
    Attack("larger pipes", answering("""
        import fcntl, os
        fcntl.fcntl(os.pipe()[0], fcntl.F_SETPIPE_SZ, 2**18)
        return 42
    """), reason="PermissionError"),
    Attack("memory that a mapping leaves behind", answering("""
        import mmap
        for _ in range(9):
            memory = mmap.mmap(-1, 2**20)
            memory.write(bytes(2**20))
            memory.resize(4096)
        return 42
    """), reason="PermissionError"),
    Attack("huge pages of which little is counted", answering("""
        import mmap, resource
        used = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        memory, before = mmap.mmap(-1, 2**28, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), used()
        try: memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError: pass
        for place in range(0, 2**28, 2**21): memory[place] = 1
        return used() - before > 2**16
    """), "assert answer(1)", bare=False, reason="assertion failed"),
    _call("the machine's huge pages", "9, 222, 0, 2**21, 3, 0x40022, -1, 0", bare=False),
    _call("locked memory", "149, 228, ctypes.create_string_buffer(4096), 4096"),
    _call("memory in a queue of messages", "68, 186, 0, 0o1600", bare=False),
    _call("contexts of asynchronous input", "206, 0, 9, ctypes.byref(ctypes.c_ulong())"),
    _call("a timer", "222, 107, 1, None, ctypes.byref(ctypes.c_int())"),
    _call("a queue of events", "291, 20, 0"),
    _call("a counter of events", "290, 19, 0, 0"),
    _call("a timer with a descriptor", "283, 85, 1, 0"),
    _call("a ring of requests", "425, 425, 8, ctypes.create_string_buffer(120)", bare=False, reason="OSError"),
    _call("a key", "248, 217, b'user', b'l2d_jax', b'x', 1, -2", bare=False),
    _call("faults handled by itself", "323, 282, 1", bare=False),
    _call("pages given to a pipe", "278, 75, os.pipe()[1], (ctypes.c_void_p * 2)(id(1), 8), 1, 0"),
    _call("a pipe copied", "276, 77, os.pipe()[0], os.pipe()[1], 1, 2", bare=False),
]  # fmt: skip

_OTHERS = [
    Attack("the host's files watched", _asking("""
        queue = call(294, 26, 0)
        return call(254, 27, queue, os.path.dirname(os.__file__).encode(), 0x20)
    """), _DONE, reason="PermissionError"),
    Attack("the host's files watched by signals", answering("""
        import fcntl, os, signal
        signal.signal(signal.SIGIO, signal.SIG_IGN)
        return fcntl.fcntl(os.open(os.path.dirname(os.__file__), 0), fcntl.F_NOTIFY, fcntl.DN_ACCESS)
    """), _DONE, reason="PermissionError"),
    Attack("a lock on a file of the host", answering("""
        import fcntl, os
        fcntl.flock(open(os.__file__), fcntl.LOCK_SH | fcntl.LOCK_NB)
        return 42
    """), reason="PermissionError"),
    Attack("a lock on a part of a file of the host", answering("""
        import fcntl, os
        fcntl.lockf(open(os.__file__), fcntl.LOCK_SH | fcntl.LOCK_NB)
        return 42
    """), reason="PermissionError"),
    Attack("a lock of a description", answering("""
        import fcntl, os, struct
        return len(fcntl.fcntl(open(os.__file__), 37, struct.pack('hhqqi', 0, 0, 0, 0, 0)))  # F_OFD_SETLK
    """), _DONE, reason="PermissionError"),
    Attack("a lease of a file of the host", answering("""
        import fcntl, os
        return fcntl.fcntl(open(os.__file__), fcntl.F_SETLEASE, fcntl.F_RDLCK)
    """), _DONE, bare=False, reason="PermissionError"),
    Attack("the host's pages dropped", answering("""
        import os
        os.posix_fadvise(os.open(os.__file__, 0), 0, 0, os.POSIX_FADV_DONTNEED)
        return 42
    """), reason="PermissionError"),
    _call("the host's disks written", "162, 81", bare=False),
    Attack("the mode of a device", answering("import os\nos.chmod('/dev/null', 0o666)\nreturn 42"), bare=False,
           reason="PermissionError"),
    Attack("higher limits", answering("""
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE))
        return 42
    """), reason="not allowed"),
    Attack("a processor of its own", answering("""
        import os
        os.sched_setaffinity(0, os.sched_getaffinity(0))
        return 42
    """), reason="PermissionError"),
    Attack("a signal", answering("import os\nos.kill(os.getpid(), 0)\nreturn 42"), reason="PermissionError"),
    Attack("a session of its own", answering("import os\nreturn os.setpgid(0, 0) or 42"), bare=False,
           reason="PermissionError"),
    Attack("itself as another program", answering("import os, sys\nos.execv(sys.executable, ['python', '-c', ''])"),
           reason="PermissionError"),
    _call("a priority", "141, 140, 0, 0, 19"),
    _call("a scheduler", "144, 119, 0, 3, ctypes.byref(ctypes.c_int())"),
    _call("a priority of input", "251, 30, 1, 0, 2 << 13 | 7"),
    _call("a signal at its parent's end", "157, 167, 1, 0"),
    _call("another personality", "135, 92, 0", bare=False),
    _call("which pages of a file are in memory", "27, 232, id(libc) & ~4095, 1, ctypes.create_string_buffer(9)"),
    _call("all processors interrupted", "324, 283, 0, 0"),
    _call("other processes compared", "312, 272, os.getpid(), os.getpid(), 0, 1, 1", bare=False),
    _call("a descriptor of a process", "434, 434, os.getpid(), 0", reason="OSError"),
    _call("the processor's counters", "298, 241, (ctypes.c_int * 32)(1, 112), 0, -1, -1, 0", bare=False),
    _call("a program in the kernel", "321, 280, 0, ctypes.create_string_buffer(128), 128", bare=False),
    _call("rules of its own", "444, 444, None, 0, 1", bare=False, reason="OSError"),
    _call("a filter of its own", "317, 277, 2, 0, ctypes.byref(ctypes.c_uint(0x7fff0000))", bare=False),
    _call("the kernel's messages", "103, 116, 10, None, 0", bare=False),
    _call("the handle of a file", "303, 264, -100, b'/usr', ctypes.create_string_buffer(b'\\x80', 140), "
          "ctypes.byref(ctypes.c_int()), 0", bare=False),
    _call("every file watched", "300, 262, 0x200, 0", bare=False),
    _call("the quotas of a disk", "179, 60, 0x800001 << 8, b'/dev/null', 0, 0", bare=False),
    _call("accounts of processes", "163, 89, None", bare=False),
    _call("a thread that shares less", "56, 220, 0x10D00, 0, 0, 0, 0", bare=False),
    _call("the second table of calls", "0x40000000 + 39, 0x40000000 + 172", bare=False, reason="SIGSYS"),
    Attack("32-bit calls", answering("""
        import ctypes, mmap
        code = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 7)
        code.write(bytes.fromhex('b814000000cd80c3'))  # getpid of 32-bit x86
        return ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()
    """), _DONE, bare=False, reason="crashed"),
]  # fmt: skip

KERNEL_ATTACKS = [*_MEMORY, *_OTHERS]
