"""vLLM's side of the `shm` backend: loads the trainer's weights from shared memory.

Runs inside vLLM's worker processes. Invariant: an update is applied completely, or fails with an
error that its caller receives (`vllm_reload.py`). It fails if the digest differs from the
trainer's.

A worker for a CPU stages the weights: while it samples, a thread of its own checks the digest and
loads them into a twin of the model (`vllm_twin.py`), and `receive_weights` only takes them over. It
learns how at its first update, which takes longer. A model that cannot be staged is loaded by vLLM
while sampling is paused, and the log says why.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.logger import init_logger

from trainer.weight_sync.segment import Named, SegmentReader, Written
from trainer.weight_sync.vllm_reload import Reload, ReloadingEngine
from trainer.weight_sync.vllm_twin import Observation, Plan, Twin, UnstageableError, learn

logger = init_logger("vllm.trainer.weight_sync")  # vLLM configures its own loggers only

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


class SharedMemoryEngine(ReloadingEngine[SharedMemoryInit, SharedMemoryUpdate]):
    """vLLM's side of the `shm` backend: loads new weights from shared memory."""

    init_info_cls = SharedMemoryInit
    update_info_cls = SharedMemoryUpdate

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._reader = SegmentReader()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stage-weights")
        self._plan: Plan | None = None
        self._refusal = self._why_not()
        self._staged: Future[Staged] | None = None

    def init_transfer_engine(self, init_info: SharedMemoryInit) -> None:
        """Begins to stage weights, and returns at once."""
        if (unused := self._staged) is not None:
            self._staged = None
            self._thread.submit(lambda: unused.result().twin.discard())
        if not init_info.path:
            return
        written = Written(init_info.path, init_info.size_bytes, init_info.digest)
        if self._plan is None:
            _report(init_info, self._refusal or "it learns how from its first update")
            return
        self._staged = self._thread.submit(self._stage, written, self._plan)
        self._staged.add_done_callback(lambda staged: _report(init_info, _failure(staged)))

    def _load(self, update_info: SharedMemoryUpdate) -> None:
        written = Written(update_info.path, update_info.size_bytes, update_info.digest)
        if (staged := self._taken(written)) is not None:
            staged.twin.adopt()
            self._thread.submit(staged.twin.discard)
            return
        tensors = self._reader.receive(written)
        known = self._plan is not None or self._refusal
        if known or self.model is not self._default_model or _lack_of_memory(written):
            self._load_tensors(tensors)
        else:
            self._learn(tensors)

    def shutdown(self) -> None:
        self._staged = None
        self._reader.close()

    def _stage(self, written: Written, plan: Plan) -> Staged:
        if lack := _lack_of_memory(written):
            raise UnstageableError(lack)
        tensors = self._reader.receive(written)
        twin = Twin(self.model, plan)
        try:
            self._reload_whole(twin.model, tensors)
        except BaseException:
            twin.discard()
            raise
        return Staged(written, twin)

    def _taken(self, written: Written) -> Staged | None:
        """The staged weights, once; None if these weights are not staged."""
        staged, self._staged = self._staged, None
        if staged is None or staged.exception() is not None:
            return None
        found = staged.result()
        return found if found.written == written else None

    def _learn(self, tensors: list[Named]) -> None:
        """Loads the weights by vLLM, and learns how to stage the next ones."""
        seen = Observation(self.model)
        with seen.watch():
            self._load_tensors(tensors)
            self.finish_weight_update()
        # In the thread that will stage, because some of torch's settings belong to a thread.
        learned = self._thread.submit(learn, self.model, seen, self._reload_whole, tensors)
        if (error := learned.exception()) is None:
            self._plan = learned.result()
            return
        self._refusal = _words(error)

    def _reload_whole(self, model: torch.nn.Module, tensors: Iterable[Named]) -> None:
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            reload = Reload(model, self.model_config, self.device)
            try:
                reload.load(tensors)
            finally:
                reload.finish()

    def _why_not(self) -> str:
        """Why weights are not staged; empty if they may be."""
        if self.device.type != "cpu":
            return f"its device is {self.device.type}, which has no memory for a second model"
        if self.vllm_config.lora_config is not None:
            return "it serves LoRA adapters"
        if self.vllm_config.quant_config is not None:
            return "it is quantized"
        return ""


def _lack_of_memory(written: Written) -> str:
    free = available_bytes()
    if free >= written.size_bytes:
        return ""
    return (
        f"{free >> 20} MiB of memory are free, and a second copy of the weights needs "
        f"{written.size_bytes >> 20} MiB"
    )


def available_bytes(root: Path = Path("/")) -> int:
    """Memory that this process can still use, on the machine and within its container."""
    info = (root / "proc/meminfo").read_text()
    available = int(info.partition("MemAvailable:")[2].split()[0]) << 10
    group = root / "sys/fs/cgroup"
    limit = group / "memory.max"
    if not limit.is_file() or (most := limit.read_text().strip()) == "max":
        return available
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    used = int((group / "memory.current").read_text()) - int(stat["inactive_file"])
    return min(available, int(most) - used)


def _failure(staged: Future[Staged]) -> str:
    error = staged.exception()
    return "" if error is None else _words(error)


def _words(error: BaseException) -> str:
    known = isinstance(error, UnstageableError)
    return str(error) if known else f"{type(error).__name__}: {error}"


def _report(init_info: SharedMemoryInit, reason: str) -> None:
    """Writes that the worker is ready for the update; `reason` says why it has staged nothing."""
    if reason:
        logger.info("sampling pauses while the next weights are loaded: %s", reason)
    line = json.dumps({"digest": init_info.digest, "reason": reason[:_REASON_BYTES]}) + "\n"
    with contextlib.suppress(OSError):  # the trainer has ended
        pipe = os.open(init_info.report, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(pipe, line.encode())
        finally:
            os.close(pipe)
