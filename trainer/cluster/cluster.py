"""The interface of the place where a run's processes are. Implementations: `local`, `ray_cluster`.

Invariant: everything that a cluster has started ends with the run, whichever way the run ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

from proxy.client import ProxyClient
from proxy.settings.late_section import load_extra
from trainer.cluster.config import ProcessesConfig
from trainer.cluster.rank_zero import RankZero
from trainer.run.folder import RunFolder


class Replica(Protocol):
    """An engine that the run started, with the whole model, on one node or on several."""

    url: str

    async def start(self) -> None:
        """Starts the engine and returns when it answers at `url`. After `wait` has returned, starts
        a new engine.

        Raises:
            EngineError, TrainerError: the engine could not be started.
        """
        ...

    async def wait(self) -> str:
        """Returns when it has ended; the result says how."""
        ...

    async def stop(self) -> None: ...


class ProxyService(Protocol):
    """The recording proxy as a process of its own."""

    admin_key: str

    @property
    def url(self) -> str:
        """Known from the first `start` on."""
        ...

    async def begin(self) -> None:
        """Does the part of `start` that needs no engines. Does not wait until it is done."""
        ...

    async def start(self) -> None:
        """Returns when it answers at `url`. After `wait` has returned, starts it again at the same
        URL."""
        ...

    async def wait(self) -> str:
        """Returns when it has ended; the result says how."""
        ...

    async def set_engines(self, engines: Sequence[dict[str, str]]) -> None:
        """Sets the engines that the proxy uses from its next start on, each a
        `proxy.config.EngineConfig`."""
        ...

    async def stop(self) -> None: ...


class WorkerProcess(Protocol):
    """One start of a relay worker, which connects to the proxy by itself."""

    async def start(self) -> None:
        """Returns when it has begun to start."""
        ...

    async def wait(self) -> str:
        """Returns when it has ended; the result says how, with the end of its log."""
        ...

    async def stop(self) -> None: ...


class Cluster(Protocol):
    """Starts the processes of a run."""

    @property
    def private_paths(self) -> list[Path]:
        """Folders of the cluster on this machine, which agents must not see."""
        ...

    @property
    def starts_engines_early(self) -> bool:
        """Whether engines may start while the trainer loads its models: not if both use a GPU,
        because an engine measures at its start how much memory is free."""
        ...

    def private_ports(self) -> frozenset[int]:
        """The TCP ports on which the run's processes and the cluster's listen now."""
        ...

    def replica(self, number: int) -> Replica: ...

    def proxy(self, settings: dict[str, Any]) -> ProxyService:
        """`settings` are the keys of `proxy.config.ProxyConfig` that the run decides."""
        ...

    def relay_worker(self, entry: Any, order: Any, log: Path) -> WorkerProcess:
        """A worker without a command: an entry of the section `relay`, and what the extra `relay`
        tells the worker."""
        ...

    def trainer(self, probe: Sequence[int]) -> AbstractAsyncContextManager[RankZero]:
        """Starts the ranks and builds the models; trainer and engines are compared on `probe`.

        Raises:
            ConfigError: a path is not a checkpoint of a causal model.
            TrainerError: a rank ended.
        """
        ...


class JoiningEngines(Protocol):
    """The engines of a `JoiningSection`, from before the proxy starts to the end of the run."""

    @property
    def proxy_settings(self) -> dict[str, Any]:
        """The keys of `proxy.config.ProxyConfig` that let them in."""
        ...

    @property
    def lives(self) -> asyncio.Task[None] | None:
        """A task that never returns, but raises a TrainerError when one keeps ending."""
        ...

    async def start(self, proxy_url: str, client: ProxyClient) -> None:
        """Starts them, and returns when the proxy has them. Raises TrainerError."""
        ...

    async def stop(self) -> None: ...


class NoEngines:
    """Implements `JoiningEngines` for a run without any."""

    lives = None

    @property
    def proxy_settings(self) -> dict[str, Any]:
        return {}

    async def start(self, proxy_url: str, client: ProxyClient) -> None:
        pass

    async def stop(self) -> None:
        pass


def joining_engines(
    config: ProcessesConfig, folder: RunFolder, cluster: Cluster, say: Callable[[str], None]
) -> JoiningEngines:
    """Those of the section `relay`. `say` is called with a line for the user."""
    if not config.relay_workers:
        return NoEngines()
    workers: JoiningEngines = load_extra("trainer.extras.relay.workers:RelayWorkers")(
        config, folder, cluster, say
    )
    return workers
