"""The interface of the place where a run's processes are. Implementations: `local`, `ray_cluster`.

Invariant: everything that a cluster has started ends with the run, whichever way the run ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field

from proxy.client import ProxyClient
from proxy.config import RetentionConfig
from proxy.settings.extra import Extra, extra
from proxy.settings.reaching import ClusterRoom
from proxy.settings.section import Common, Section
from trainer.cluster.proxy_server import ProxyServerConfig
from trainer.cluster.rank_zero import RankZero
from trainer.ranks_config import RanksConfig
from trainer.run.folder import RunFolder


class ClusterConfig(ClusterRoom):
    """Section `cluster`. Example: ClusterConfig(backend="ray", strategy="PACK")"""

    backend: Common[Literal["local", "ray"]] = "local"
    """Where engines and ranks run: processes on this machine, or actors on a Ray cluster."""
    address: Common[str | None] = None
    """Address of a running Ray cluster, as for `ray.init`; None: start one for this run, on this
    machine."""
    namespace: str = "agentic-rl"
    """Ray namespace of the named actors: `engine-0`, `rank-0`, `proxy`."""
    strategy: Common[Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"]] = "STRICT_PACK"
    """Strategy of the placement group. `engine.weight_transfer: shm` needs `STRICT_PACK`, which
    places everything on one node."""
    share_gpus: Common[bool] = False
    """Engine i and rank i share a GPU, of which Ray reserves half for each; otherwise each has its
    own GPU. Needs `engine.gpu_memory_share`, because no plan divides the memory on Ray."""
    engine_nodes: Common[int] = Field(1, ge=1)
    """Number of bundles over which the workers of each engine are divided, so that they can be on
    as many nodes; Ray places each bundle by `strategy`. It divides `--tensor-parallel-size` in
    `engine.args`. Not with `STRICT_PACK`, and only with `engine.weight_transfer: nccl` or `gloo`.
    Without GPUs, the two numbers must be equal."""
    engine_cpus: float = Field(1.0, ge=0)
    """CPUs reserved for each engine, in each of its `engine_nodes` bundles."""
    engine_gpus: int | None = Field(None, ge=0)
    """Number of GPUs reserved for each engine, which uses all of them; None: as many as
    `--tensor-parallel-size` in `engine.args` says, or 1, if the cluster has GPUs. A rank has one
    GPU if engines have GPUs."""
    rank_cpus: float = Field(1.0, ge=0)
    """CPUs reserved for each rank."""
    proxy: Literal["driver", "actor"] = "driver"
    """Where the proxy runs: on the node of the driver and its agents, or on the node of engine 0.
    Its store is in `trainer.run_dir`, which must be accessible on that node."""
    room_timeout_s: float = Field(120.0, gt=0)


class JoiningSection(Section):
    """A section of engines that connect to the run's proxy by themselves. Implementation: the extra
    `relay`."""

    @property
    def count(self) -> int:
        """Number of these engines."""
        return 0

    def describe(self, backend: Literal["local", "ray"]) -> list[str]:
        """The lines of a run's plan."""
        return []

    def problems(
        self, backend: Literal["local", "ray"], server: ProxyServerConfig
    ) -> Iterator[str]:
        """One line per setting that contradicts another one."""
        return iter(())


class ProcessesConfig(RanksConfig):
    """The sections that the processes of a run read: ranks, engines and proxy."""

    proxy_server: ProxyServerConfig = ProxyServerConfig()
    cluster: ClusterConfig = ClusterConfig()
    relay: Annotated[JoiningSection | None, Extra("trainer.extras.relay.config:RelaySection")] = (
        None
    )
    """Engines that a run starts where it cannot connect to, but they can to it."""
    retention: RetentionConfig = RetentionConfig()
    """How long sessions are kept in the run's own store. The same limits apply to the folders in
    its `trials/`. Samples that wait to be trained are stored elsewhere."""
    telemetry: Annotated[Section | None, Extra("proxy.extras.telemetry.spans:TelemetryConfig")] = (
        None
    )
    """OpenTelemetry of the trainer and of the proxy that it starts."""

    @property
    def relay_workers(self) -> int:
        """Number of engines that connect to the run's proxy by themselves."""
        return 0 if self.relay is None else self.relay.count


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
    workers: JoiningEngines = extra("trainer.extras.relay.workers:RelayWorkers")(
        config, folder, cluster, say
    )
    return workers
