"""A relay worker as an actor of a Ray cluster, on any node that has what its entry reserves."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import ray

from trainer.cluster.config import ClusterConfig
from trainer.errors import TrainerError
from trainer.extras.ray.actors import RelayActor, awaited, end, until_end
from trainer.extras.relay.config import RelayWorkersConfig
from trainer.extras.relay.order import WorkerOrder
from trainer.extras.relay.worker_process import NODE


class RayWorker:
    """Example: RayWorker(config.cluster, entry, order, folder.logs / "relay-0.log")

    Its actor is outside the run's placement group, whose strategy may be one node.
    """

    def __init__(
        self, cluster: ClusterConfig, entry: RelayWorkersConfig, order: WorkerOrder, log: Path
    ) -> None:
        self._cluster = cluster
        self._entry = entry
        self._order = order
        self._log = log
        self._actor: Any = None
        self._is_placed = False

    async def start(self) -> None:
        """Raises TrainerError: no node had room for it within `cluster.room_timeout_s`."""
        entry, timeout_s = self._entry, self._cluster.room_timeout_s
        self._actor = (
            ray.remote(RelayActor)
            .options(
                name=self._order.name,
                namespace=self._cluster.namespace,
                num_cpus=entry.cpus,
                num_gpus=entry.gpus,
                resources=dict(entry.resources),
            )
            .remote(NODE, self._order, self._log)
        )
        try:
            async with asyncio.timeout(timeout_s):
                await awaited(self._actor.start.remote(), self._whose)
                self._is_placed = True
        except TimeoutError:
            wanted = {"CPU": entry.cpus, "GPU": entry.gpus, **entry.resources}
            raise TrainerError(
                f"relay.workers: {self._order.name} found no node with {wanted} free in "
                f"{timeout_s:g} s (cluster.room_timeout_s); the cluster has "
                f"{ray.cluster_resources()}, of which are free {ray.available_resources()}"
            ) from None

    async def wait(self) -> str:
        how, self._actor = await until_end(self._actor, self._whose)
        return how

    async def stop(self) -> None:
        if not self._is_placed and self._actor is not None:  # it would wait for a node
            ray.kill(self._actor)
            return
        await end(self._actor, self._whose)

    @property
    def _whose(self) -> str:
        return f"the actor of {self._order.name}"
