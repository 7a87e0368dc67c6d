"""What may stand in the place of a file, and is none."""

import os
import stat
from pathlib import Path

ODD = ("fifo", "socket", "folder", "dangling", "loop", "device")


def make_odd(path: Path, kind: str) -> Path:
    """Put something of a kind of `ODD` in the place of a file."""
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        os.mknod(path, stat.S_IFSOCK | 0o600)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to({"dangling": "/nowhere/at/all", "loop": path.name, "device": "/dev/zero"}[kind])
    return path
