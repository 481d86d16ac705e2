"""Finds out by file locks which of the proxy processes on one store file are alive.

Invariant: `alive(n)` is True exactly while the `Liveness` object with number `n` exists. The object
holds a lock on byte `n` of a file next to the store. The kernel releases the lock when the process
ends, also after `kill -9`, so that neither a heartbeat nor a clock is needed.
"""

from __future__ import annotations

import fcntl
import os
import struct
import sys
from pathlib import Path

from proxy.machine.file_lock import is_locked

_BYTES = sys.platform == "linux"
"""Whether bytes of one file are locked. Numbers are never used twice, so that a file that a killed
owner leaves is in nobody's way."""
_FLOCK = "hhqqi4x"  # struct flock of 64-bit Linux: type, whence, start, length, pid


class Liveness:
    """One owner's lock. It uses open-file-description locks, so that two owners in one process are
    distinct; where the system is not Linux, a locked file of each owner."""

    def __init__(self, path: Path, number: int) -> None:
        """Raises OSError if the file cannot be opened, or if byte `number` is locked."""
        self.number = number
        self._path = path
        own = path if _BYTES else self._file(number)
        self._fd = os.open(own, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if _BYTES:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _byte_lock(fcntl.F_WRLCK, number))
        else:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def alive(self, number: int) -> bool:
        if number == self.number:
            return True
        if not _BYTES:
            return is_locked(self._file(number))
        held = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, _byte_lock(fcntl.F_WRLCK, number))
        return bool(struct.unpack(_FLOCK, held)[0] != fcntl.F_UNLCK)

    def release(self) -> None:
        if not _BYTES:
            self._file(self.number).unlink(missing_ok=True)
        os.close(self._fd)

    def _file(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")


def _byte_lock(kind: int, number: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, number, 1, 0)
