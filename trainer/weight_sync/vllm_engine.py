"""vLLM's side of the `shm` backend: loads the trainer's weights from shared memory.

Runs inside vLLM's worker processes. Invariant: an update is applied completely, or fails with an
error that its caller receives (`vllm_reload.py`). It fails if the digest differs from the
trainer's.

While it samples, a thread of its own checks the digest, and loads the weights if it can stage them
(`vllm_staging.py`): hashing the weights of a model of 70 B takes 10 s, in which nothing would be
sampled.
"""

from __future__ import annotations

import contextlib
import json
import os
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from trainer.weight_sync.segment import Named, SegmentReader, Written
from trainer.weight_sync.vllm_staging import StagingEngine, log_unstaged, words
from trainer.weight_sync.vllm_twin import Twin

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
    """Weights whose digest is right, and the twin that has loaded them; None: the update loads
    them, because of `reason`."""

    written: Written
    tensors: list[Named]
    twin: Twin | None
    reason: str = ""

    def discard(self) -> None:
        if self.twin is not None:
            self.twin.discard()


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
            self._thread.submit(lambda: unused.result().discard())
        if not init_info.path:
            return
        written = Written(init_info.path, init_info.size_bytes, init_info.digest)
        self._staged = self._thread.submit(self._stage, written)
        self._staged.add_done_callback(lambda staged: _report(init_info, _failure(staged)))

    def _load(self, update_info: SharedMemoryUpdate) -> None:
        written = Written(update_info.path, update_info.size_bytes, update_info.digest)
        staged = self._taken(written)
        if staged is None:
            self._load_unstaged(self._reader.receive(written), written.size_bytes)
        elif staged.twin is None:
            self._load_unstaged(staged.tensors, written.size_bytes)
        else:
            self._adopt(staged.twin)

    def shutdown(self) -> None:
        self._staged = None
        self._reader.close()

    def _stage(self, written: Written) -> Staged:
        tensors = self._reader.receive(written)
        if reason := self._why_unstaged(written.size_bytes):
            return Staged(written, tensors, None, reason)
        try:
            return Staged(written, [], self._filled(tensors))
        except Exception as error:  # noqa: BLE001 (of the loader of any model)
            return Staged(written, tensors, None, words(error))

    def _taken(self, written: Written) -> Staged | None:
        """The staged weights, once; None if these weights were not received."""
        staged, self._staged = self._staged, None
        if staged is None or staged.exception() is not None:
            return None
        found = staged.result()
        if found.written == written:
            return found
        self._thread.submit(found.discard)
        return None


def _failure(staged: Future[Staged]) -> str:
    error = staged.exception()
    return staged.result().reason if error is None else words(error)


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
