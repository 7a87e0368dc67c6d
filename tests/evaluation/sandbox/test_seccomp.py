import errno
import struct

import pytest

from l2d_jax.evaluation.sandbox import seccomp

ALLOW, KILL = 0x7FFF0000, 0x80000000
EPERM, ENOSYS = 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
# By machine, as in the kernel's tables: fork, openat, socket, clone, clone3.
NUMBERS = {"x86_64": (57, 257, 41, 56, 435), "aarch64": (None, 56, 198, 220, 435)}
THREAD = 0x10000


def run(program: bytes, *, architecture: int, number: int, argument: int = 0) -> int:
    """What the kernel would: the plain interpreter of the few operations that the filter has."""
    data = struct.pack("=IIQQ", number, architecture, 0, argument)
    steps = list(struct.iter_unpack("=HBBI", program))
    place, loaded = 0, 0
    while True:
        operation, if_true, if_false, value = steps[place]
        if operation == 0x06:
            return value
        if operation == 0x20:
            [loaded], taken = struct.unpack_from("=I", data, value), None
        else:
            taken = {0x15: loaded == value, 0x35: loaded >= value, 0x45: bool(loaded & value)}[operation]
        place += 1 + (0 if taken is None else if_true if taken else if_false)


@pytest.mark.parametrize("machine", seccomp.ARCHITECTURES)
@pytest.mark.parametrize("threads", [True, False])
def test_the_filter(machine, threads):
    program, architecture = seccomp.program(machine, threads=threads), seccomp.ARCHITECTURES[machine]
    assert len(program) < 8 * 4096  # BPF_MAXINSNS

    def answer(number, argument=0):
        return run(program, architecture=architecture, number=number, argument=argument)

    fork, openat, socket, clone, clone3 = NUMBERS[machine]
    assert answer(openat) == answer(0) == ALLOW
    assert answer(socket) == answer(clone) == answer(clone, 0x10000000 | 17) == EPERM
    assert answer(clone, THREAD | 0x3D0F00) == (ALLOW if threads else EPERM)
    assert answer(clone3) == ENOSYS
    assert fork is None or answer(fork) == EPERM
    assert answer(0x40000000 + openat) == KILL
    assert run(program, architecture=0x40000003, number=openat) == KILL  # 32-bit calls of x86
