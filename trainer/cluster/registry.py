"""Every place where a run's processes can be, by its name in `cluster.backend`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from proxy.errors import ConfigurationError
from proxy.settings.late_section import load_extra
from trainer.cluster.cluster import Cluster
from trainer.cluster.config import ProcessesConfig
from trainer.cluster.local import LocalCluster
from trainer.errors import ConfigError
from trainer.run.control import RunControl
from trainer.run.folder import RunFolder


@asynccontextmanager
async def open_cluster(
    config: ProcessesConfig, folder: RunFolder, control: RunControl
) -> AsyncIterator[Cluster]:
    """The cluster that `cluster.backend` names.

    Raises:
        ConfigError: Ray is not installed, does not answer, or has not enough free resources.
    """
    if config.cluster.backend == "local":
        yield LocalCluster(config, folder, control)
        return
    try:
        ray_cluster = load_extra("trainer.extras.ray.cluster:ray_cluster")
    except ConfigurationError as error:
        raise ConfigError(f"cluster.backend=ray: {error}; run `pip install ray`") from error
    async with ray_cluster(config, folder, control) as cluster:
        yield cluster
