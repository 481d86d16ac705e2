"""Whether another process holds the lock of a file. The kernel releases a lock when its process
dies, so that a lock that is held is that of a process that runs."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def is_locked(path: Path) -> bool:
    """Whether a process holds the exclusive lock of the file; False if there is no such file."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(file)


@contextmanager
def free_path(path: Path) -> Iterator[Path]:
    """Holds the lock of this file, or, if another process holds it, yields a path beside it with
    this process's number in its name."""
    with path.open("ab") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            path = path.with_stem(f"{path.stem}-{os.getpid()}")
        yield path
