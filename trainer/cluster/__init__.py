"""Where a run's processes are: on this machine, or on a Ray cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from trainer.cluster.local import LocalCluster
from trainer.cluster.protocol import Cluster
from trainer.config import TrainerConfig
from trainer.errors import ConfigError
from trainer.run.control import RunControl
from trainer.run.folder import RunFolder


@asynccontextmanager
async def open_cluster(
    config: TrainerConfig, folder: RunFolder, control: RunControl
) -> AsyncIterator[Cluster]:
    """By `cluster.backend`.

    Raises:
        ConfigError: Ray is not installed, does not answer, or has no room.
    """
    if config.cluster.backend == "local":
        yield LocalCluster(config, folder, control)
        return
    try:
        from trainer.cluster.ray_cluster import ray_cluster
    except ImportError as error:
        raise ConfigError(f"cluster.backend=ray: {error}; pip install 'agentic-rl[ray]'") from error
    async with ray_cluster(config, folder, control) as cluster:
        yield cluster
