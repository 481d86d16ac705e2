"""Sends new versions of a LoRA adapter to running engines, which never stop sampling.

Each version is a folder in PEFT's format and has an engine name of its own that contains its digest
(`planner@7.3fa9c2…`), of the tensors and the configuration. vLLM keeps keys and values, and running
requests, by this name, so that versions are never mixed; a version that is loaded twice is the same
adapter.

Invariant: when `push` returns, every engine serves exactly this version of the adapter under
`served_name`. The version before it stays loaded for the calls that still run; older ones get no
new calls, and their files stay for as long as a running call may need them.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash

from proxy.routing.policies import KEPT_VERSIONS, LOADED_VERSIONS
from trainer.policy.adapter import save_adapter
from trainer.weight_sync.control import EngineControl
from trainer.weight_sync.segment import Named
from trainer.weight_sync.sync import SyncReport, verify_engines


class AdapterSync:
    """Sends one policy's adapter to all engines. Its methods block.

    Example:
        sync = AdapterSync(EngineControl(urls), Path("runs/a/adapters"), "planner")
        sync.push(adapter_tensors(model), adapter_config(model), version=7)
        sync.served_name      # "planner@7.3fa9c2…"
    """

    def __init__(self, control: EngineControl, folder: Path, policy: str) -> None:
        """`folder` must be readable by the engines under the same path."""
        self.control = control
        self.served_name = ""
        """The engines' name of the last version; empty before the first `push`."""
        self._folder = folder.absolute()
        self._policy = policy

    def push(self, tensors: Iterable[Named], config: Mapping[str, Any], version: int) -> SyncReport:
        """Loads the adapter in every engine.

        Raises:
            WeightSyncError: an engine refused it, with its reason.
        """
        started = time.perf_counter()
        held = on_host(tensors)
        name = adapter_name(self._policy, str(version), held, config)
        folder = self._folder / name
        if not folder.exists():
            partial = self._folder / f".{name}"
            save_adapter(held, dict(config), partial)
            partial.rename(folder)
        os.utime(folder)  # the newest is the one that was sent last
        self.control.load_adapter(name, folder)
        self.served_name = name
        self._forget()
        size = sum(tensor.nbytes for _, tensor in held)
        total_s = time.perf_counter() - started
        return SyncReport(version, paused_s=0.0, total_s=total_s, size_bytes=size)

    def verify(self, ids: list[int], logprobs: list[float], tolerance: float) -> float:
        """As `WeightSync.verify`."""
        return verify_engines(self.control, ids, logprobs, tolerance, model=self.served_name)

    def try_out(
        self,
        tensors: Iterable[Named],
        config: Mapping[str, Any],
        ids: list[int],
        logprobs: list[float],
        tolerance: float,
    ) -> float:
        """As `verify`, of an adapter that is not a version of the policy: it is then unloaded and
        deleted, and the engines serve the versions that they served before."""
        held = on_host(tensors)
        name = adapter_name(self._policy, "check", held, config)
        folder = self._folder / f".{name}"
        save_adapter(held, dict(config), folder)
        try:
            self.control.load_adapter(name, folder)
            return verify_engines(self.control, ids, logprobs, tolerance, model=name)
        finally:
            try:
                self.control.unload_adapters(lambda each: each == name)
            finally:
                shutil.rmtree(folder)

    def close(self) -> None:
        self.control.close()

    def _forget(self) -> None:
        """Unloads and deletes old versions, also those of an earlier start of the run."""
        ours = f"{self._policy}@"
        sent = sorted(self._folder.glob(f"{ours}*"), key=lambda path: path.stat().st_mtime_ns)
        loaded = {folder.name for folder in sent[-LOADED_VERSIONS:]}
        self.control.unload_adapters(lambda name: name.startswith(ours) and name not in loaded)
        for folder in sent[:-KEPT_VERSIONS]:
            shutil.rmtree(folder)


def adapter_name(
    policy: str, version: str, tensors: Iterable[Named], config: Mapping[str, Any]
) -> str:
    """The engines' name of a version of an adapter, whose tensors are in host memory."""
    return f"{policy}@{version}.{_digest(tensors, config)}"


def on_host(tensors: Iterable[Named]) -> list[Named]:
    return [(name, tensor.detach().cpu().contiguous()) for name, tensor in tensors]


def _digest(tensors: Iterable[Named], config: Mapping[str, Any]) -> str:
    total = xxhash.xxh3_64(json.dumps(config, sort_keys=True).encode())
    for name, tensor in tensors:
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.view(-1).view(dtype=torch.uint8).numpy().tobytes())
    return total.hexdigest()
