"""How a process gets a secret, and keeps it from other processes of the same user.

Invariant: a secret of ours stands in no environment and no command line. A parent gives it to its
child through a pipe, which is empty once the child has read it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

PR_SET_DUMPABLE = 4
VARIABLES = frozenset(
    {
        "AGENTIC_PROXY_ADMIN_KEY",
        "AGENTIC_PROXY_RELAY__TOKEN",
        "AGENTIC_SWARM_TOKEN",
        "AGENTIC_WORKER_TOKEN",
        "AGENTIC_WORKER_ENGINE_API_KEY",
        "HARBOR_SERVER_TOKEN",
    }
)
"""Variables in which a user may give a secret. Processes that we start do not inherit them."""


@contextlib.contextmanager
def pipe_with(text: str) -> Iterator[int]:
    """The end of a pipe from which a child reads `text`, once: to be given as `pass_fds`, and as
    `/dev/fd/NUMBER` where the child wants a path."""
    read_fd, write_fd = os.pipe()
    threading.Thread(target=_write, args=(write_fd, text.encode()), daemon=True).start()
    try:
        yield read_fd
    finally:
        os.close(read_fd)


def from_pipe(fd: int) -> str:
    """What the parent wrote; it can be read once.

    Raises:
        OSError: the parent has given no such pipe, or it was read before.
    """
    with Path(f"/dev/fd/{fd}").open() as pipe:
        text = pipe.read()
    os.close(fd)
    return text


def inherited() -> dict[str, str]:
    """Our environment without `VARIABLES`."""
    return {name: value for name, value in os.environ.items() if name not in VARIABLES}


def hide_memory() -> None:
    """Keeps other processes of this user (not root's) from this process's memory, descriptors and
    environment in `/proc`; there are no core dumps either. Children that exec are not affected.
    Does nothing where the system is not Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def _write(fd: int, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError), os.fdopen(fd, "wb") as pipe:
        pipe.write(data)
