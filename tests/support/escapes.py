"""What generated code may try: to use the machine up, and to get out of its process; see `attacks`."""

from tests.support.attacks import Attack, answering

_SECRET = "assert answer(1) == 'SECRET'"

_LOADS = [
    Attack("an endless loop", answering("while True: pass"), bare=False, reason="timeout"),
    Attack("an endless loop at import", "while True: pass", bare=False, reason="timeout"),
    Attack(
        "an endless loop that catches everything",
        answering("while True:\n    try:\n        while True: pass\n    except BaseException: pass"),
        bare=False,
        reason="timeout",
    ),
    Attack(
        "an endless loop in C", answering("import itertools\nsum(itertools.repeat(0))"), bare=False, reason="timeout"
    ),
    Attack("sleep", answering("import time\ntime.sleep(10**6)"), bare=False, reason="timeout"),
    Attack(
        "alarms and signals ignored",
        answering("""
            import signal
            for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}: signal.signal(number, signal.SIG_IGN)
            while True: pass
        """),
        bare=False,
        reason="timeout",
    ),
    Attack(
        "a stopped process",
        answering("import signal\nsignal.raise_signal(signal.SIGSTOP)"),
        bare=False,
        reason="timeout",
    ),
    Attack(
        "3 GB of memory",
        answering("return len(bytearray(3 * 2**30))"),
        "assert answer(1) == 3 * 2**30",
        bare=False,
        reason="memory",
    ),
    Attack(
        "memory that limits do not count",
        answering("import os\nreturn os.memfd_create('memory') > 0"),
        "assert answer(1)",
        reason="PermissionError",
    ),
    Attack(
        "200 forks",
        answering("""
            import os, time
            for _ in range(200):
                if os.fork() == 0:
                    time.sleep(1)
                    os._exit(0)
            return 42
        """),
        reason="PermissionError",
    ),
    Attack(
        "200 threads",
        answering("""
            import threading, time
            threading.stack_size(2**16)  # so that memory is no limit
            for _ in range(200): threading.Thread(target=time.sleep, args=[1]).start()
            return 42
        """),
        reason="can't start new thread",
    ),
    Attack(
        "a daemon left behind",
        answering("""
            import os, time
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    time.sleep(5)
                os._exit(0)
            return 42
        """),
        reason="PermissionError",
    ),
    Attack("1 GB of output", answering("for _ in range(1024): print('x' * 2**20)\nreturn 42"), reason="File too large"),
    Attack(
        "1 GB of output on every descriptor",
        answering("""
            import os
            for d in range(1, 64):
                try:
                    while os.write(d, bytes(2**20)): pass
                except OSError: pass
        """),
        bare=False,
    ),
    Attack("a huge answer", answering("return 'x' * 10**8"), "assert len(answer(1)) == 10**8", reason="too large"),
    Attack(
        "an answer nested deeply",
        answering("value = []\nfor _ in range(10**5): value = [value]\nreturn value"),
        "assert type(answer(1)) is list",
        reason="not plain data",
    ),
    Attack(
        "an answer that contains itself", answering("value = []\nvalue.append(value)\nreturn value"), "assert answer(1)"
    ),
    Attack(
        "an answer that doubles at each level",
        answering("value = [0]\nfor _ in range(60): value = [value, value]\nreturn value"),
        "assert type(answer(1)) is list",
        reason="timeout",
    ),
    Attack(
        "the disk filled",
        answering("""
            import os
            total = 0
            for number in range(64):
                with open(f'/tmp/filler{number}', 'wb') as file:
                    os.unlink(file.name)
                    total += os.posix_fallocate(file.fileno(), 0, 2**20) or 2**20
                    globals().setdefault('held', []).append(os.dup(file.fileno()))
            return total
        """),
        "assert answer(1) == 2**26",
        reason="Read-only file system",
    ),
]

_UNSHARE = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
_ESCAPES = [
    Attack("writing outside", answering("open('FOLDER/written', 'w').write('x')\nreturn 42"), reason="No such file"),
    Attack(
        "writing over the system",
        answering("open('/usr/lib/l2d_jax_written', 'w')\nreturn 42"),
        bare=False,
        reason="exception",
    ),
    Attack("writing a new root", answering("open('/l2d_jax_written', 'w')\nreturn 42"), bare=False, reason="exception"),
    Attack(
        "writing over the isolated code",
        answering("""
            import sys
            module = sys.modules['l2d_jax.evaluation.sandbox.isolated.plain_data']
            open(module.__file__, 'a').write(' ')
            return 42
        """),
        bare=False,
        reason="exception",
    ),
    Attack("a file outside", answering("return open('FOLDER/secret').read()"), _SECRET, reason="No such file"),
    Attack("the environment", answering("import os\nreturn os.environ['L2D_JAX_VALUE']"), _SECRET, reason="KeyError"),
    Attack("the parent's environment", answering("return open('/proc/PARENT/environ').read(1)"), "assert answer(1)"),
    Attack("the parent's memory", answering("return len(open('/proc/PARENT/maps').read(9))"), "assert answer(1) == 9"),
    Attack(
        "the parent's descriptors", answering("import os\nreturn os.listdir('/proc/PARENT/fd')"), "assert answer(1)"
    ),
    Attack(
        "the parent's memory through the kernel",
        answering(
            "buffer = ctypes.create_string_buffer(64)\n"
            "vector = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 64)\n"
            "libc.process_vm_readv(PARENT, vector, 1, vector, 1, 0)\nreturn ctypes.get_errno()",
            before=_UNSHARE,
        ),
        "assert answer(1) != 1",  # EPERM; a bare process gets as far as the address
        reason="assertion failed",
    ),
    Attack(
        "loopback",
        answering("import socket\nreturn socket.create_connection(('127.0.0.1', PORT), 2).recv(99).decode()"),
        _SECRET,
        reason="PermissionError",
    ),
    Attack(
        "an abstract socket",
        answering("""
            import socket
            s = socket.socket(socket.AF_UNIX)
            s.connect('\\0ABSTRACT')
            return s.recv(99).decode()
        """),
        _SECRET,
        reason="PermissionError",
    ),
    Attack(
        "a network of its own",
        answering("import socket\nsocket.create_server(('127.0.0.1', 0))\nreturn 42"),
        reason="Permission",
    ),
    Attack(
        "the parent killed", answering("import os\nos.kill(PARENT, 9)\nreturn 42"), bare=False, reason="PermissionError"
    ),
    Attack(
        "its parent and its group killed",
        answering("""
            import contextlib, os, time
            with contextlib.suppress(OSError): os.kill(os.getppid(), 9)
            os.killpg(0, 9)
            time.sleep(1)
            return 42
        """),
        bare=False,
        reason="PermissionError",
    ),
    Attack(
        "everything visible killed",
        answering("import os\nos.kill(-1, 9)\nreturn 42"),
        bare=False,
        reason="PermissionError",
    ),
    Attack(
        "a nested user namespace",
        answering("return libc.unshare(0x10000000)", before=_UNSHARE),
        "assert answer(1) == 0",
        reason="assertion failed",
    ),
    Attack(
        "a nested user namespace by clone",  # SYS_clone of x86_64, and of aarch64
        answering(
            "import os\nnumber = 56 if os.uname().machine == 'x86_64' else 220\n"
            "child = libc.syscall(number, 0x10000000 | 17, 0, 0, 0, 0)\n"
            "if child == 0: os._exit(0)\nreturn child > 0",
            before=_UNSHARE,
        ),
        "assert answer(1)",
        reason="assertion failed",
    ),
    Attack(
        "a file system of its own",
        answering("return libc.mount(b'none', b'/tmp', b'tmpfs', 0, None)", before=_UNSHARE),
        "assert answer(1) == 0",
        bare=False,
        reason="assertion failed",
    ),
    Attack(
        "os reloaded",
        "import os, importlib\nos.system = None\n"
        + answering("""
            system = importlib.reload(os).system
            return system('echo > FOLDER/reloaded') == 0
        """),
        "assert answer(1)",
    ),
    Attack(
        "another program",
        answering("import subprocess\nreturn subprocess.run(['/bin/sh', '-c', 'true']).returncode"),
        "assert answer(1) == 0",
        reason="exception",
    ),
]

ESCAPES = [*_LOADS, *_ESCAPES]
