"""Finds out by file locks which of the proxy processes on one store file are alive.

Invariant: `alive(n)` is True exactly while the `Liveness` object with number `n` exists. The object
holds a lock on byte `n` of a file next to the store. The kernel releases the lock when the process
ends, also after `kill -9`, so that neither a heartbeat nor a clock is needed.
"""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

_FLOCK = "hhqqi4x"  # struct flock of 64-bit Linux: type, whence, start, length, pid


class Liveness:
    """One owner's lock. It uses open-file-description locks (Linux), so that two owners in one
    process are distinct."""

    def __init__(self, path: Path, number: int) -> None:
        """Raises OSError if the file cannot be opened, or if byte `number` is locked."""
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
