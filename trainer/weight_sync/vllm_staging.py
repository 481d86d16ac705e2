"""What vLLM's side of `shm` and `gloo` does with new weights: it stages them while it samples.

Runs inside vLLM's worker processes. A worker for a CPU loads new weights into a twin of the model
(`vllm_twin.py`) in a thread of its own, and an update only takes them over. It learns how at its
first update, which takes longer. A model that cannot be staged is loaded by vLLM while sampling is
paused, and the log says why.

Invariant: nothing of the model changes before `receive_weights`.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.logger import init_logger

from trainer.weight_sync.segment import Named
from trainer.weight_sync.vllm_reload import Reload, ReloadingEngine
from trainer.weight_sync.vllm_twin import Observation, Plan, Twin, UnstageableError, learn

logger = init_logger("vllm.trainer.weight_sync")  # vLLM configures its own loggers only

Init = TypeVar("Init", bound=WeightTransferInitInfo)
Update = TypeVar("Update", bound=WeightTransferUpdateInfo)


class StagingEngine(ReloadingEngine[Init, Update]):
    """A subclass receives the weights, and implements `init_transfer_engine`, `_load` and
    `shutdown`."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stage-weights")
        """Where weights are staged. It is one thread, so that one update is staged at a time."""
        self._plan: Plan | None = None
        self._refusal = self._why_not()

    def _why_unstaged(self, size_bytes: int) -> str:
        """Why weights of this size are not staged now; empty if they can be."""
        if self._plan is None:
            return self._refusal or "it learns how from its first update"
        return lack_of_memory(size_bytes)

    def _filled(self, tensors: Iterable[Named]) -> Twin:
        """A twin with these weights, made in `_thread`.

        Raises:
            ValueError: as `Reload.load`.
        """
        assert self._plan is not None
        twin = Twin(self.model, self._plan)
        try:
            self._reload_whole(twin.model, tensors)
        except BaseException:
            twin.discard()
            raise
        return twin

    def _adopt(self, twin: Twin) -> None:
        try:
            twin.adopt()
        finally:
            self._thread.submit(twin.discard)

    def _load_unstaged(self, tensors: list[Named], size_bytes: int) -> None:
        """Loads the weights by vLLM, and learns how to stage the next ones if it can."""
        known = self._plan is not None or self._refusal
        if known or self.model is not self._default_model or lack_of_memory(size_bytes):
            self._load_tensors(tensors)
            return
        seen = Observation(self.model)
        with seen.watch():
            self._load_tensors(tensors)
            self.finish_weight_update()
        # In the thread that will stage, because some of torch's settings belong to a thread.
        learned = self._thread.submit(learn, self.model, seen, self._reload_whole, tensors)
        if (error := learned.exception()) is None:
            self._plan = learned.result()
            return
        self._refusal = words(error)

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


def log_unstaged(reason: str) -> None:
    """Logs why a worker has not staged weights; empty if it has."""
    if reason:
        logger.info("sampling pauses while the next weights are loaded: %s", reason)


def log_unreceived(staged: Future[Any]) -> None:
    """Logs the error of weights that were not received."""
    if (error := staged.exception()) is not None:
        logger.error("weights were not received, and the old ones are kept: %s", words(error))


def lack_of_memory(size_bytes: int) -> str:
    """Why a second copy of weights of this size cannot be held; empty if it can be."""
    free = available_bytes()
    if free >= size_bytes:
        return ""
    return (
        f"{free >> 20} MiB of memory are free, and a second copy of the weights needs "
        f"{size_bytes >> 20} MiB"
    )


def available_bytes(root: Path = Path("/")) -> int:
    """Memory that this process can still use, on the machine and within its container."""
    info = (root / "proc/meminfo").read_text(encoding="utf-8")
    available = int(info.partition("MemAvailable:")[2].split()[0]) << 10
    group = root / "sys/fs/cgroup"
    limit = group / "memory.max"
    if not limit.is_file() or (most := limit.read_text(encoding="utf-8").strip()) == "max":
        return available
    stat = dict(
        line.split() for line in (group / "memory.stat").read_text(encoding="utf-8").splitlines()
    )
    used = int((group / "memory.current").read_text(encoding="utf-8")) - int(stat["inactive_file"])
    return min(available, int(most) - used)


def words(error: BaseException) -> str:
    """Example: words(KeyError("w")) is "KeyError: 'w'"."""
    known = isinstance(error, UnstageableError)
    return str(error) if known else f"{type(error).__name__}: {error}"
