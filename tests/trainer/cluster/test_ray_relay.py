"""Relay workers as actors on a node of a Ray cluster that has a resource of its own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.needs import skip_or_fail
from tests.trainer.cluster.relay_processes import ALONE, SCRIPT
from tests.trainer.cluster.test_services import ScriptedTrainer
from tests.trainer.test_fit import config_of
from trainer.cluster.services import RunServices
from trainer.config import TrainerConfig
from trainer.extras.ray import worker as ray_worker
from trainer.run.control import RunControl
from trainer.run.folder import RunFolder

try:
    import ray

    from tests.trainer.cluster.test_ray_nodes import NODE, nodes
    from trainer.extras.ray.cluster import ray_cluster
except ImportError:
    skip_or_fail("ray is not installed: pip install 'agentic-rl[ray]'", at_import=True)

pytestmark = pytest.mark.slow
__all__ = ["nodes"]
SITE = {"site_b": 1.0}


@pytest.fixture(autouse=True)
def scripted_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_worker, "NODE", SCRIPT)


def config(model: Path, **cluster: Any) -> TrainerConfig:
    cluster = {"backend": "ray", "rank_cpus": 0.1, "room_timeout_s": 60} | cluster
    relay = {"workers": [{"cpus": 0.1, "resources": SITE}], "restarts": 1}
    return config_of(model, engine=ALONE, cluster=cluster, relay=relay)


@pytest.mark.long
def test_worker_runs_where_its_resource_is_and_moves_when_its_node_is_lost(
    tiny_model: Path, tmp_path: Path, nodes: Any
) -> None:
    settings, folder = config(tiny_model), RunFolder.create(tmp_path / "run")
    site = nodes.add_node(**NODE, resources=SITE)

    async def node_of(name: str) -> str:
        actor = ray.get_actor(name, namespace="agentic-rl")
        found: str = await actor.__ray_call__.remote(
            lambda self: ray.get_runtime_context().get_node_id()
        )
        return found

    async def lose_the_site() -> None:
        said: asyncio.Queue[str] = asyncio.Queue()
        control, trainer = RunControl(), ScriptedTrainer()
        async with (
            ray_cluster(settings, folder, control) as cluster,
            RunServices(
                settings, folder, control, cluster, trainer.rank_zero, said.put_nowait
            ).running() as services,
        ):
            assert [each["name"] for each in await services.proxy.engines()] == ["relay-0"]
            assert await node_of("relay-0") == site.node_id
            other = nodes.add_node(**NODE, resources=SITE)
            nodes.remove_node(site, allow_graceful=False)
            while "relay-0.2 is connected" not in (line := await said.get()):
                assert "the actor of relay-0" in line or line.startswith("relay: ")
            assert await node_of("relay-0.2") == other.node_id

    asyncio.run(lose_the_site())
