"""Section `relay`: workers that a run starts where it cannot connect to, but they can to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

from proxy.http.web_guard import EVERYWHERE
from proxy.settings.reaching import RayResources, Restarts
from proxy.settings.section import Common
from trainer.cluster.config import JoiningSection
from trainer.cluster.proxy_server import ProxyServerConfig

NUMBER = "{number}"
"""In a command or a variable: the worker's number among those of its entry, from 0."""


class RelayWorkersConfig(RayResources):
    """Workers that are started alike.

    Example: RelayWorkersConfig(command=("ssh", "gpu-7", "agentic-train", "relay-worker"), count=2)
    """

    command: tuple[str, ...] = ()
    """The program that starts a worker, and its arguments: `ssh`, `kubectl exec -i` or `srun`
    followed by `agentic-train relay-worker` (docs/relay.md). In each argument, `{number}` is
    the worker's number in this entry. Empty: a process on this machine; with `cluster.backend: ray`
    an actor, on any node with what the entry reserves."""
    count: int = Field(1, ge=1)
    """Number of workers, each with an engine of its own."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the command and of the engine that `agentic-train relay-worker`
    starts; `{number}` as in `command`. Example: `CUDA_VISIBLE_DEVICES: "{number}"`."""
    model: Path | None = None
    """Folder of the checkpoint on the worker's machine; None: the path of `model.path`."""
    cpus: float = Field(1.0, ge=0)
    """With Ray and without a `command`: CPUs that Ray reserves for each worker."""
    gpus: float = Field(0.0, ge=0)
    """With Ray and without a `command`: GPUs that Ray reserves for each worker."""

    @property
    def placed_by_ray(self) -> bool:
        """Whether it has keys that only Ray understands."""
        return self.cpus != 1.0 or self.gpus > 0 or bool(self.resources)


class RelaySection(Restarts, JoiningSection):
    """Example: RelaySection(workers=[{"command": ["ssh", "gpu-7", "agentic-train", …]}])"""

    workers: Common[tuple[RelayWorkersConfig, ...]] = ()
    """Engines behind a firewall: the run starts the workers, which connect to its proxy."""
    url: Common[str | None] = Field(None, pattern="^wss?://.+")
    """URL by which workers reach the proxy; None: `proxy_server.llm_proxy_ip`, or the proxy's host,
    and its port."""
    restarts: Common[int] = Field(8, ge=0)
    start_timeout_s: Common[float] = Field(900.0, gt=0)

    @property
    def count(self) -> int:
        """Number of workers of all entries."""
        return sum(each.count for each in self.workers)

    def describe(self, backend: Literal["local", "ray"]) -> list[str]:
        """The lines of a run's plan."""
        alone = "as actors of Ray" if backend == "ray" else "on this machine"
        return [
            f"relay: {each.count} worker{'s' if each.count > 1 else ''} "
            f"{f'by {each.command[0]}' if each.command else alone}"
            for each in self.workers
        ]

    def problems(
        self, backend: Literal["local", "ray"], server: ProxyServerConfig
    ) -> Iterator[str]:
        """One line per setting that contradicts another one."""
        if self.workers and server.url is not None:
            yield (
                f"relay.workers: the relay token of the proxy at proxy_server.url={server.url} is "
                "not known to the run; start `agentic-worker` there, or remove proxy_server.url"
            )
        address = server.llm_proxy_ip or server.host
        if self.workers and self.url is None and address in EVERYWHERE:
            yield (
                f"relay.url: missing; workers cannot connect to proxy_server.host={server.host}; "
                "give the URL by which they reach the proxy, like wss://trainer.example.org"
            )
        for number, each in enumerate(self.workers):
            key = f"relay.workers.{number}"
            if each.placed_by_ray and (each.command or backend == "local"):
                other = f"{key}.command" if each.command else "cluster.backend=local"
                yield f"{key}: Ray reserves cpus, gpus and resources; remove them, or {other}"
