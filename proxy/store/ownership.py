"""Which proxy processes that share one store file are alive, known by a lock that dies with them.

Invariant: `alive(n)` is True exactly while the process (more exactly: the `Ownership` object) that
got number `n` exists. Each owner holds a lock on byte `n` of one file beside the store; the kernel
drops it at the process's end, also at `kill -9`, so nothing needs a heartbeat or a clock.
"""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

_FLOCK = "hhqqi4x"  # struct flock of 64-bit Linux: type, whence, start, length, pid


class Ownership:
    """Open-file-description locks (Linux): two owners in one process are two owners."""

    def __init__(self, path: Path, number: int) -> None:
        """Raises OSError where the file cannot be opened or byte `number` is taken."""
        self.number = number
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _byte_lock(fcntl.F_WRLCK, number))

    def alive(self, number: int) -> bool:
        if number == self.number:
            return True
        held = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, _byte_lock(fcntl.F_WRLCK, number))
        return bool(struct.unpack(_FLOCK, held)[0] != fcntl.F_UNLCK)

    def release(self) -> None:
        os.close(self._fd)


def _byte_lock(kind: int, number: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, number, 1, 0)
