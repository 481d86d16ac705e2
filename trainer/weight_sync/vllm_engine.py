"""vLLM's side of the `shm` backend: loads the trainer's weights from shared memory.

Runs inside vLLM's worker processes. Invariant: an update is applied completely, or fails with an
error that its caller receives (`vllm_reload.py`). It fails if the digest differs from the
trainer's.

A worker that can stages the weights (`vllm_staging.py`): while it samples, a thread of its own
checks the digest and loads them.
"""

from __future__ import annotations

import contextlib
import json
import os
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from trainer.weight_sync.segment import SegmentReader, Written
from trainer.weight_sync.vllm_staging import StagingEngine, log_unstaged, words
from trainer.weight_sync.vllm_twin import Twin, UnstageableError

_REASON_BYTES = 500  # a line must fit into a pipe's atomic write


@dataclass
class SharedMemoryInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Weights to stage; without a path, none. `report` is the pipe to which each worker writes one
    line as soon as `receive_weights` may follow."""

    path: str = ""
    size_bytes: int = 0
    digest: str = ""
    report: str = ""


@dataclass
class SharedMemoryUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Where the new weights are: the file, its size, and the digest of its content."""

    path: str
    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Staged:
    """Weights that only have to be taken over."""

    written: Written
    twin: Twin


class SharedMemoryEngine(StagingEngine[SharedMemoryInit, SharedMemoryUpdate]):
    """vLLM's side of the `shm` backend: loads new weights from shared memory."""

    init_info_cls = SharedMemoryInit
    update_info_cls = SharedMemoryUpdate

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._reader = SegmentReader()
        self._staged: Future[Staged] | None = None

    def init_transfer_engine(self, init_info: SharedMemoryInit) -> None:
        """Begins to stage weights, and returns at once."""
        if (unused := self._staged) is not None:
            self._staged = None
            self._thread.submit(lambda: unused.result().twin.discard())
        if not init_info.path:
            return
        written = Written(init_info.path, init_info.size_bytes, init_info.digest)
        self._staged = self._thread.submit(self._stage, written)
        self._staged.add_done_callback(lambda staged: _report(init_info, _failure(staged)))

    def _load(self, update_info: SharedMemoryUpdate) -> None:
        written = Written(update_info.path, update_info.size_bytes, update_info.digest)
        if (staged := self._taken(written)) is not None:
            self._adopt(staged.twin)
        else:
            self._load_unstaged(self._reader.receive(written), written.size_bytes)

    def shutdown(self) -> None:
        self._staged = None
        self._reader.close()

    def _stage(self, written: Written) -> Staged:
        if reason := self._why_unstaged(written.size_bytes):
            raise UnstageableError(reason)
        return Staged(written, self._filled(self._reader.receive(written)))

    def _taken(self, written: Written) -> Staged | None:
        """The staged weights, once; None if these weights are not staged."""
        staged, self._staged = self._staged, None
        if staged is None or staged.exception() is not None:
            return None
        found = staged.result()
        if found.written == written:
            return found
        self._thread.submit(found.twin.discard)
        return None


def _failure(staged: Future[Staged]) -> str:
    error = staged.exception()
    return "" if error is None else words(error)


def _report(init_info: SharedMemoryInit, reason: str) -> None:
    """Writes that the worker is ready for the update; `reason` says why it has staged nothing."""
    log_unstaged(reason)
    line = json.dumps({"digest": init_info.digest, "reason": reason[:_REASON_BYTES]}) + "\n"
    with contextlib.suppress(OSError):  # the trainer has ended
        pipe = os.open(init_info.report, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(pipe, line.encode())
        finally:
            os.close(pipe)
