"""A Ray cluster of several nodes, which are processes on this machine; one of them is lost."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.needs import skip_or_fail
from tests.trainer.fake_server import FakeServer
from tests.trainer.test_fit import config_of
from trainer.cluster.services import RunServices
from trainer.errors import TrainerError
from trainer.run.control import RunControl
from trainer.run.folder import RunFolder
from trainer.weight_sync.control import EngineControl

try:
    import ray
    from ray.cluster_utils import Cluster

    from trainer.extras.ray.cluster import ray_cluster
except ImportError:
    skip_or_fail("ray is not installed: pip install 'agentic-rl[ray]'", at_import=True)

pytestmark = pytest.mark.slow

NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Three nodes with room for one bundle each. The first one runs Ray's head and must stay."""
    config = {
        "worker_register_timeout_seconds": 300,
        "worker_niceness": 0,
        "health_check_initial_delay_ms": 0,
        "health_check_period_ms": 1000,
    }
    with ExitStack() as stack:
        # The paths of Ray's sockets would be too long in pytest's temporary folders.
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-"))
        monkeypatch.setenv("RAY_TMPDIR", folder)
        nodes = Cluster()
        # Registered before the first node starts: a node that fails to start leaves no process.
        stack.callback(nodes.shutdown)
        nodes.add_node(**NODE, _system_config=config)
        for _ in range(2):
            nodes.add_node(**NODE)
        stack.callback(ray.shutdown)
        ray.init(address=nodes.address, log_to_driver=False)
        yield nodes


async def lose_the_node_of_an_engine(nodes: Any) -> str:
    """The engine's name; its node is not the head."""
    for name in ("engine-0", "engine-1"):
        actor = ray.get_actor(name, namespace="agentic-rl")
        its_id = await actor.__ray_call__.remote(
            lambda self: ray.get_runtime_context().get_node_id()
        )
        node = next(node for node in nodes.list_all_nodes() if node.node_id == its_id)
        if node is not nodes.head_node:
            nodes.remove_node(node, allow_graceful=False)
            return name
    raise AssertionError("both engines are on the head")


@pytest.mark.long
def test_engine_of_a_lost_node_moves_to_another_node_or_the_run_ends(
    tiny_model: Path, tmp_path: Path, nodes: Any
) -> None:
    settings = config_of(
        tiny_model,
        engine={"replicas": 2, "verify": False, "verify_tolerance": 1e-3},
        cluster={
            "backend": "ray",
            "engine_cpus": 0.6,
            "rank_cpus": 0.6,
            "room_timeout_s": 60,
        },
    )
    # The configuration refuses this with `shm`, because nodes are usually different machines.
    spread = settings.cluster.model_copy(update={"strategy": "STRICT_SPREAD"})
    settings = settings.model_copy(update={"cluster": spread})
    folder = RunFolder.create(tmp_path / "run")

    async def lose_nodes() -> None:
        messages: asyncio.Queue[str] = asyncio.Queue()
        control = RunControl()
        async with (
            ray_cluster(settings, folder, control, FakeServer) as cluster,
            cluster.trainer(()) as rank_zero,
            RunServices(
                settings, folder, control, cluster, rank_zero, messages.put_nowait
            ).running() as services,
        ):
            before = {engine["name"]: engine["url"] for engine in await services.proxy.engines()}
            await services.engines.send_weights()
            nodes.add_node(**NODE)
            lost = await lose_the_node_of_an_engine(nodes)
            # How depends on what ends first with the node, the engine's process or its actor.
            assert (await messages.get()).startswith(f"warning: {lost} ended with ")
            now = before
            while len(now) < 2 or now == before:
                now = {engine["name"]: engine["url"] for engine in await services.proxy.engines()}
                await control.finish(asyncio.sleep(0.1))
            await lose_the_node_of_an_engine(nodes)
            await control.finish(asyncio.sleep(600))

    with pytest.raises(TrainerError, match=r"the actor of engine-\d found no node with room .*CPU"):
        asyncio.run(lose_nodes())


async def where(name: str) -> tuple[str, int]:
    """The node of an engine's actor, and the process id of the guard of its server there."""
    actor = ray.get_actor(name, namespace="agentic-rl")
    found: tuple[str, int] = await actor.__ray_call__.remote(
        lambda self: (ray.get_runtime_context().get_node_id(), self._replica._server.guard)
    )
    return found


@pytest.mark.long
def test_engine_that_spans_nodes_ends_as_a_whole_and_starts_again_elsewhere(
    tiny_model: Path, tmp_path: Path, nodes: Any
) -> None:
    settings = config_of(
        tiny_model,
        engine={"weight_transfer": "gloo", "args": ["-tp", "2"]},
        cluster={
            "backend": "ray",
            "strategy": "STRICT_SPREAD",
            "engine_nodes": 2,
            "engine_cpus": 0.6,
            "rank_cpus": 0.6,
            "room_timeout_s": 300,
        },
    )
    folder = RunFolder.create(tmp_path / "run")
    names = ("engine-0", "engine-0-node-1")

    async def lose_parts() -> None:
        async with ray_cluster(settings, folder, RunControl(), FakeServer) as cluster:
            replica = cluster.replica(0)
            await replica.start()
            first, second = [await where(name) for name in names]
            assert first[0] != second[0]

            lost, left = (
                (second, first) if second[0] != nodes.head_node.node_id else (first, second)
            )
            nodes.add_node(**NODE)
            node = next(each for each in nodes.list_all_nodes() if each.node_id == lost[0])
            nodes.remove_node(node, allow_graceful=False)
            await replica.wait()
            assert not psutil.pid_exists(left[1])
            await replica.start()
            moved = [await where(name) for name in names]
            assert lost[0] not in {node for node, _ in moved}
            assert moved[0][0] != moved[1][0]

            headless = ray.get_actor(names[1], namespace="agentic-rl")
            await headless.__ray_call__.remote(lambda self: self._replica._server.kill())
            assert "engine-0-node-1.log" in await replica.wait()
            assert not any(psutil.pid_exists(guard) for _, guard in moved)
            await replica.start()
            with closing(EngineControl([replica.url])) as engine:
                assert engine.weight_versions() == ["0"]
            again = [await where(name) for name in names]
            assert [node for node, _ in again] == [node for node, _ in moved]
            await replica.stop()
            assert not any(psutil.pid_exists(guard) for _, guard in again)

    asyncio.run(lose_parts())
