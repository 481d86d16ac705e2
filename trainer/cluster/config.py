"""The sections of the configuration that say where a run's processes are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from proxy.config import RetentionConfig
from proxy.settings.late_section import LateSection
from proxy.settings.reaching import ClusterRoom
from proxy.settings.section import Common, Section
from trainer.cluster.proxy_server import ProxyServerConfig
from trainer.ranks_config import RanksConfig


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
    relay: Annotated[
        JoiningSection | None, LateSection("trainer.extras.relay.config:RelaySection")
    ] = None
    """Engines that a run starts where it cannot connect to, but they can to it."""
    retention: RetentionConfig = RetentionConfig()
    """How long sessions are kept in the run's own store. The same limits apply to the folders in
    its `trials/`. Samples that wait to be trained are stored elsewhere."""
    telemetry: Annotated[
        Section | None, LateSection("proxy.extras.telemetry.spans:TelemetryConfig")
    ] = None
    """OpenTelemetry of the trainer and of the proxy that it starts."""

    @property
    def relay_workers(self) -> int:
        """Number of engines that connect to the run's proxy by themselves."""
        return 0 if self.relay is None else self.relay.count
