"""Ends NCCL's operations when a member of the group of a weight transfer is lost.

NCCL itself never ends them: the kernels of all other members wait. Who finds a member lost calls
`abort`, which ends its own operations and says so in the group's store; each member that is
`watched` looks there, and takes the end of the store, which is in the trainer's process, for the
same.

Invariant: after an abort, the communicator is disabled. vLLM's then skips operations without an
error, so that who has waited must look (`is_aborted`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

ABORTED = "weight-transfer/aborted"
"""A key of the store; its presence ends the group."""
LOOK_S = 0.5
"""Seconds between two looks of a member that waits; each is a request to the trainer."""


def abort(communicator: Any) -> None:
    """Ends the operations of this member of a `PyNcclCommunicator`, and those of the members that
    are `watched`."""
    communicator.group.store.set(ABORTED, "")
    communicator.destroy()


def is_aborted(communicator: Any) -> bool:
    return bool(communicator.disabled)


@contextmanager
def watched(communicator: Any) -> Iterator[None]:
    """A context in which an abort of the group ends this member's operations, too."""
    left = Event()

    def watch() -> None:
        while not left.wait(LOOK_S):
            try:
                ended = communicator.group.store.check([ABORTED])
            except RuntimeError:  # the trainer has ended
                ended = True
            if ended:
                communicator.destroy()
                return

    looking = Thread(target=watch, name="watch-weight-transfer", daemon=True)
    looking.start()
    try:
        yield
    finally:
        left.set()
        looking.join()
