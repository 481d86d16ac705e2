"""Temporary folders that the next start removes if their process was killed.

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


@contextmanager
def swept_folder(prefix: str) -> Iterator[Path]:
    """A temporary folder. Removes those of this user with this prefix whose process has ended."""
    sweep(prefix)
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    fd = os.open(folder / "unlocked", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        (folder / "unlocked").rename(folder / LOCK)  # found by others only now that it is held
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(fd)


def sweep(prefix: str) -> None:
    """Removes this user's folders with this prefix that nobody holds."""
    for lock in Path(tempfile.gettempdir()).glob(f"{prefix}*/{LOCK}"):
        with contextlib.suppress(OSError):  # another user's, held, or removed meanwhile
            fd = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
            try:
                if os.fstat(fd).st_uid == os.getuid() and os.fstat(fd).st_size == 0:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(lock.parent)
            finally:
                os.close(fd)
