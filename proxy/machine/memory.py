"""Returns freed memory to the operating system.

glibc keeps freed memory for later use, in up to eight arenas per processor, so that a process stays
at the size of its largest moment. Does nothing on other platforms.
"""

from __future__ import annotations

import asyncio
import ctypes

TRIM_AFTER_BYTES = 2**20
"""Bytes of request bodies after which a trim pays: parsing, keying and rendering small messages
takes up to 50 times the memory of their body."""
TRIM_DELAY_S = 1.0
"""Delay of a trim, so that a busy process trims once per second. A trim takes some milliseconds."""
_M_ARENA_MAX, _M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -8, -3, -1
"""Names of `mallopt`'s settings."""
_SETTINGS = {_M_ARENA_MAX: 1, _M_MMAP_THRESHOLD: 2**20, _M_TRIM_THRESHOLD: 2**22}
"""One arena, because each keeps free memory of its own. Blocks of more than 1 MiB are mapped one by
one and unmapped when they are free; by default this size grows to 32 MiB. Smaller ones are reused:
the body and the prompt of a long conversation would otherwise need a hundred new pages each, which
cost a tenth of its call. The heap keeps 4 MiB of free memory at its end until the next trim."""


class Trimmer:
    """Trims the heap after work on large bodies. Example: trimmer.after(len(body))"""

    def __init__(self) -> None:
        self._libc = _glibc()
        self._timer: asyncio.TimerHandle | None = None
        self._work_bytes = 0
        if self._libc is not None:
            for name, value in _SETTINGS.items():
                self._libc.mallopt(name, value)

    def after(self, body_bytes: int) -> None:
        """Counts the bytes of a body that was freed; schedules a trim if they are many."""
        self._work_bytes += body_bytes
        if self._work_bytes < TRIM_AFTER_BYTES or self._timer is not None or self._libc is None:
            return
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(TRIM_DELAY_S, self._trim, loop, self._libc)

    def stop(self) -> None:
        """Cancels a scheduled trim."""
        if self._timer is not None:
            self._timer.cancel()

    def _trim(self, loop: asyncio.AbstractEventLoop, libc: ctypes.CDLL) -> None:
        self._timer, self._work_bytes = None, 0
        loop.run_in_executor(None, libc.malloc_trim, 0)  # a foreign call releases the GIL


def _glibc() -> ctypes.CDLL | None:
    """The C library of this process; None if it has no `malloc_trim`."""
    try:
        libc = ctypes.CDLL(None)
        libc.malloc_trim.argtypes = [ctypes.c_size_t]
    except (OSError, AttributeError):
        return None
    return libc
