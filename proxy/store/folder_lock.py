"""Opens a store in one process at a time.

Invariant: processes that open the same SQLite file wait for each other. Otherwise one changes the
layout of a new file while another one opens a connection that never waits for a lock.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Holds the lock of the folder. Raises OSError if the folder cannot be read."""
    held = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)
