"""Passes secrets to child processes, and hides them from other processes of the same user.

Invariant: no environment and no command line contains a secret of ours. A parent passes it to its
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

from proxy.direct_hosts import with_direct_hosts

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
    """The read end of a pipe from which a child reads `text` once. Pass it in `pass_fds`; where the
    child expects a path, give `/dev/fd/NUMBER`."""
    pipe = LatePipe()
    pipe.write(text)
    with pipe.to_child() as read_fd:
        yield read_fd


class LatePipe:
    """A pipe to a child that starts before it is known what the child is to read.

    Example:
    with pipe.to_child() as fd:
        ...  # starts the child, which waits when it reads
    pipe.write("settings")
    """

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe()
        self.written = False

    @contextlib.contextmanager
    def to_child(self) -> Iterator[int]:
        """The read end, as in `pipe_with`; it is closed here at the end of the context."""
        try:
            yield self._read_fd
        finally:
            os.close(self._read_fd)

    def write(self, text: str) -> None:
        """Gives the child all that it reads. To be called once."""
        self.written = True
        threading.Thread(target=_write, args=(self._write_fd, text.encode()), daemon=True).start()

    def close(self) -> None:
        """Lets the child read nothing, unless `write` was called."""
        if not self.written:
            self.written = True
            os.close(self._write_fd)


def from_pipe(fd: int) -> str:
    """The text that the parent wrote, which can be read only once.

    Raises:
        OSError: the parent passed no such pipe, or it was already read.
    """
    with Path(f"/dev/fd/{fd}").open(encoding="utf-8") as pipe:
        text = pipe.read()
    os.close(fd)
    return text


def inherited() -> dict[str, str]:
    """The environment of a child process of ours: our own without `VARIABLES`. No HTTP proxy is
    used for this machine."""
    ours = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    return with_direct_hosts(ours)


def hide_memory() -> None:
    """Keeps other processes of this user (not root's) from this process's memory, descriptors and
    environment in `/proc`; there are no core dumps either. Children that exec are not affected.
    Does nothing where the system is not Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def _write(fd: int, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError), os.fdopen(fd, "wb") as pipe:
        pipe.write(data)
