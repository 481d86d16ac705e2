"""What a run asks of the place where its processes are. Implementations: `local`, `ray_cluster`.

Invariant: whatever a cluster has started ends with the run, however it ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from trainer.cluster.trainer import Trainer


class Replica(Protocol):
    """One engine of ours, with the whole model."""

    url: str

    async def start(self) -> None:
        """Returns when it answers, at `url`; again, where `wait` has returned: a new one.

        Raises:
            EngineError, TrainerError: it could not be started.
        """
        ...

    async def wait(self) -> str:
        """Until it ends; how it did."""
        ...

    async def stop(self) -> None: ...


class Proxy(Protocol):
    """The recording proxy as a process of its own."""

    admin_key: str
    url: str

    async def start(self) -> None:
        """Returns when it answers, at `url`; again, where `wait` has returned: at the same one."""
        ...

    async def wait(self) -> str:
        """Until it ends; how it did."""
        ...

    async def set_engines(self, engines: Sequence[dict[str, str]]) -> None:
        """What it serves from its next start on: `proxy.config.EngineConfig` each."""
        ...

    async def stop(self) -> None: ...


class Cluster(Protocol):
    def replica(self, number: int) -> Replica: ...

    def proxy(self, settings: dict[str, Any]) -> Proxy:
        """`settings`: keys of `proxy.config.ProxyConfig` that the run decides."""
        ...

    def trainer(self, probe: Sequence[int]) -> AbstractAsyncContextManager[Trainer]:
        """The ranks, with the models built; `probe` is what engines are compared with them on.

        Raises:
            ConfigError: a path is not a checkpoint of a causal model.
            TrainerError: a rank ended.
        """
        ...
