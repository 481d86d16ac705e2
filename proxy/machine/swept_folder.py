"""Temporary folders that the next start removes if their process was killed, with the shared memory
that is named after them.

Invariant: a folder is removed only by its own process, or when nobody holds the lock on its `lock`
file, which the kernel releases when its process ends in any way.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = "lock"
SHARED_MEMORY = Path("/dev/shm")


@contextmanager
def swept_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """A temporary folder in `parent`, None: where temporary files are. Removes those of this user
    with this prefix whose process has ended. Its path has no more than 8 characters after the
    prefix, because it may hold Unix sockets."""
    sweep(prefix, parent)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    fd = os.open(folder / "unlocked", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        (folder / "unlocked").rename(folder / LOCK)  # found by others only now that it is held
        yield folder
    finally:
        _remove(folder)
        os.close(fd)


def memory_prefix(folder: Path) -> str:
    """How the names of shared memory begin that is removed together with the folder."""
    return f"psm_{folder.name}_"


def sweep(prefix: str, parent: Path | None = None) -> None:
    """Removes this user's folders with this prefix that nobody holds."""
    for lock in (parent or Path(tempfile.gettempdir())).glob(f"{prefix}*/{LOCK}"):
        with contextlib.suppress(OSError):  # another user's, held, or removed meanwhile
            fd = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
            try:
                if os.fstat(fd).st_uid == os.getuid() and os.fstat(fd).st_size == 0:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(lock.parent)
            finally:
                os.close(fd)


def _remove(folder: Path) -> None:
    for memory in SHARED_MEMORY.glob(f"{memory_prefix(folder)}*"):
        with contextlib.suppress(OSError):  # removed meanwhile
            memory.unlink()
    shutil.rmtree(folder, ignore_errors=True)
