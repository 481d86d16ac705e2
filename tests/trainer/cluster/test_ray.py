"""A run on a Ray cluster of one node: equal to a run on this machine; lost processes are replaced
or reported."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from agent_loop.processes.host import Job, ProcessHost
from agent_loop.producers.rollout_config import RolloutConfig
from agent_loop.producers.sync import SyncProducer
from agent_loop.records import Rollout, Task
from agent_loop.tasks import Source, TaskStream
from proxy import wall
from proxy.machine import landlock
from proxy.records import Origin, SessionKind
from proxy.wall import Wall
from tests.needs import skip_or_fail
from tests.trainer.cluster.relay_processes import ALONE
from tests.trainer.cluster.test_services import ScriptedTrainer
from tests.trainer.fake_engine import fake_engine
from tests.trainer.fake_server import FakeServer
from tests.trainer.score_text import ScoreText
from tests.trainer.test_fit import ScriptedTrials, config_of, run_once, scored_on
from trainer.checkpoint import Checkpoints
from trainer.cluster.config import ClusterConfig
from trainer.cluster.services import RunServices
from trainer.config import TrainerConfig
from trainer.engine import EnginesConfig
from trainer.errors import ConfigError, TrainerError
from trainer.fit import Fit
from trainer.run.control import RunControl
from trainer.run.folder import RunFolder
from trainer.run.log import RunLog
from trainer.weight_sync.control import EngineControl

try:
    import ray

    from trainer.extras.ray.cluster import bundles, ray_cluster
except ImportError:
    skip_or_fail("ray is not installed: pip install 'agentic-rl[ray]'", at_import=True)

pytestmark = pytest.mark.slow

STEPS = 3
NO_WALL = wall.missing() or landlock.missing()


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-"))
        stack.callback(ray.shutdown)
        ray.init(
            address="local",
            num_cpus=1,
            object_store_memory=80 * 2**20,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=folder,
            # A worker imports Ray and the trainer first, which takes minutes on a busy machine, and
            # longer where it gives way to all others, which is Ray's default.
            _system_config={"worker_register_timeout_seconds": 300, "worker_niceness": 0},
        )
        yield


def config(model: Path, **sections: Any) -> TrainerConfig:
    share = {"backend": "ray", "engine_cpus": 0.1, "rank_cpus": 0.1, "proxy": "actor"}
    return config_of(
        model,
        model={"max_micro_batch_tokens": 24},
        engine={"replicas": 2, "verify": False, "verify_tolerance": 1e-3},
        # SGD-like: a large epsilon, as Adam would turn rounding noise into steps
        optimizer={"lr": 1e-2, "eps": 1e-2, "schedule": "constant"},
        trainer={"steps": STEPS, "ranks": 2, "save_every": 0},
        cluster=share | sections.pop("cluster", {}),
        **sections,
    )


class LosesAReplica(ScriptedTrials):
    trials = 0

    async def run(
        self,
        task: Task,
        *,
        kind: SessionKind,
        seed: int = 0,
        version: int = 0,
        origin: Origin | None = None,
    ) -> Rollout:
        self.trials += 1
        if self.trials == 8:  # of the second step
            actor = ray.get_actor("engine-1", namespace="agentic-rl")
            os.kill(await actor.__ray_call__.remote(lambda self: os.getpid()), signal.SIGKILL)
        return await super().run(task, kind=kind, seed=seed, version=version, origin=origin)


async def run_on_ray(settings: TrainerConfig, folder: RunFolder) -> list[str]:
    """Runs to the end. Returns the lines for the user, then each engine's version of the
    weights."""
    messages: list[str] = []
    control = RunControl()
    with closing(RunLog(settings.logging, folder, steps=STEPS)) as log:
        async with (
            ray_cluster(settings, folder, control, FakeServer) as cluster,
            cluster.trainer(()) as rank_zero,
            RunServices(
                settings, folder, control, cluster, rank_zero, messages.append
            ).running() as services,
        ):
            tasks = [Task(f"task-{number}", {}) for number in range(5)]
            producer = SyncProducer(
                LosesAReplica(scored_on(rank_zero), None),
                TaskStream([Source("s", tasks)], seed=1),
                RolloutConfig(groups_per_step=2, group_size=3),
                seed=settings.trainer.seed,
            )
            checkpoints = Checkpoints(folder.checkpoints, keep_last=2)
            fit = Fit(
                settings.trainer,
                settings.eval,
                rank_zero,
                services.engines,
                producer,
                None,
                checkpoints,
                log,
                control,
            )
            assert await fit.run() == "done"
            engines = {engine["name"]: engine["url"] for engine in await services.proxy.engines()}
            assert sorted(engines) == ["engine-0", "engine-1"]
            with closing(EngineControl(services.engines.urls)) as served:
                return messages + served.weight_versions()


def weights(folder: RunFolder) -> dict[str, torch.Tensor]:
    saved = Checkpoints(folder.checkpoints, keep_last=2).latest()
    assert saved is not None
    return dict(AutoModelForCausalLM.from_pretrained(saved.path / "model").state_dict())


@pytest.mark.long
def test_run_that_loses_a_replica_ends_with_the_weights_of_a_local_run(
    tiny_model: Path, tmp_path: Path
) -> None:
    here, there = (RunFolder.create(tmp_path / name) for name in ("here", "there"))
    warning, *versions = asyncio.run(run_on_ray(config(tiny_model), there))
    assert warning.startswith("warning: engine-1 ended with the actor of engine-1 is gone")
    assert versions == [str(STEPS)] * 2
    with fake_engine() as (_, url):
        alone = config(tiny_model, cluster={"backend": "local"})
        alone = alone.model_copy(update={"trainer": alone.trainer.model_copy(update={"ranks": 1})})
        asyncio.run(run_once(alone, here, url))
    expected = weights(here)
    for name, weight in weights(there).items():
        torch.testing.assert_close(weight, expected[name], atol=1e-4, rtol=1e-3, msg=name)


def test_engine_whose_server_ends_before_its_lost_actor_gets_another_actor(
    tiny_model: Path, tmp_path: Path
) -> None:
    settings, folder = config(tiny_model), RunFolder.create(tmp_path / "a")

    async def lose_the_server_and_then_the_actor() -> None:
        async with ray_cluster(settings, folder, RunControl(), FakeServer) as cluster:
            replica = cluster.replica(0)
            await replica.start()
            actor = ray.get_actor("engine-0", namespace="agentic-rl")
            await actor.__ray_call__.remote(lambda self: self._replica._server.kill())
            assert "exit code" in await replica.wait()
            ray.kill(actor)
            await replica.start()
            with closing(EngineControl([replica.url])) as engine:
                assert engine.weight_versions() == ["0"]
            await replica.stop()

    asyncio.run(lose_the_server_and_then_the_actor())


def test_killed_rank_ends_the_run_with_a_clear_message(tiny_model: Path, tmp_path: Path) -> None:
    settings, folder = config(tiny_model), RunFolder.create(tmp_path / "a")

    async def lose_a_rank() -> None:
        control = RunControl()
        async with (
            ray_cluster(settings, folder, control, FakeServer) as cluster,
            cluster.trainer(()) as rank_zero,
        ):
            await rank_zero.ask(ScoreText([1, 2, 3]))
            ray.kill(ray.get_actor("rank-1", namespace="agentic-rl"))
            await control.finish(rank_zero.ask(ScoreText([1, 2, 3])))

    with pytest.raises(
        TrainerError, match=r"rank 1 of the trainer ended: .* is gone.*the run again"
    ):
        asyncio.run(lose_a_rank())


@pytest.mark.parametrize(
    ("asked", "said"),
    [({"engine_cpus": 50}, "'CPU': 50"), ({"engine_gpus": 1}, "'GPU'")],
)
def test_cluster_without_enough_resources_is_an_error_at_once(
    tiny_model: Path, tmp_path: Path, asked: dict[str, int], said: str
) -> None:
    settings = config(tiny_model, cluster=asked)

    async def connect() -> None:
        folder = RunFolder.create(tmp_path / "a")
        async with ray_cluster(settings, folder, RunControl()):
            pass

    with pytest.raises(ConfigError, match=rf"no room for .*{said}.* in 0 s"):
        asyncio.run(connect())


def test_engines_and_ranks_have_their_own_gpus_or_share_them_in_pairs(tiny_model: Path) -> None:
    own = config(tiny_model)
    own = own.model_copy(update={"engine": EnginesConfig(replicas=2, args=("-tp", "2"))})
    assert [bundle["GPU"] for bundle in bundles(own, has_gpus=True)] == [2, 2, 1, 1]
    part = own.model_copy(update={"engine": EnginesConfig(replicas=2, gpu_memory_share=0.4)})
    shared = part.model_copy(update={"cluster": ClusterConfig(backend="ray", share_gpus=True)})
    assert [bundle["GPU"] for bundle in bundles(shared, has_gpus=True)] == [1, 1]
    assert all("GPU" not in bundle for bundle in bundles(shared, has_gpus=False))


def test_engine_that_spans_nodes_has_a_bundle_for_each_node(tiny_model: Path) -> None:
    spans = config(tiny_model, cluster={"engine_cpus": 3})
    engine = EnginesConfig(replicas=2, args=("-tp", "8"))
    cluster = spans.cluster.model_copy(update={"engine_nodes": 2})
    spans = spans.model_copy(update={"engine": engine, "cluster": cluster})
    *engines, rank, other_rank = bundles(spans, has_gpus=True)
    assert engines == [{"CPU": 3, "GPU": 4}] * 4
    assert rank == other_rank == {"CPU": 0.1, "GPU": 1}
    assert bundles(spans, has_gpus=False)[:4] == [{"CPU": 3}] * 4


def test_engine_with_several_workers_on_a_node_without_gpus_is_refused(
    tiny_model: Path, tmp_path: Path
) -> None:
    settings = config(tiny_model)
    engine = EnginesConfig(replicas=1, args=("-tp", "4"), weight_transfer="gloo")
    cluster = settings.cluster.model_copy(update={"engine_nodes": 2, "strategy": "PACK"})
    settings = settings.model_copy(update={"engine": engine, "cluster": cluster})

    async def connect() -> None:
        async with ray_cluster(settings, RunFolder.create(tmp_path / "a"), RunControl()):
            pass

    with pytest.raises(ConfigError, match=r"engine_nodes=2: .* one worker on each node, not 2; "):
        asyncio.run(connect())


def test_relay_worker_without_a_node_is_reported_with_what_the_cluster_has(
    tiny_model: Path, tmp_path: Path
) -> None:
    """A relay worker, which asks for a resource that no node has."""
    settings = config_of(
        tiny_model,
        engine=ALONE,
        cluster={"backend": "ray", "rank_cpus": 0.1, "room_timeout_s": 3},
        relay={"workers": [{"cpus": 0.1, "resources": {"site_b": 1.0}}], "restarts": 1},
    )
    folder = RunFolder.create(tmp_path / "run")

    async def start() -> None:
        control = RunControl()
        rank_zero = ScriptedTrainer().rank_zero
        async with (
            ray_cluster(settings, folder, control) as cluster,
            RunServices(settings, folder, control, cluster, rank_zero, print).running(),
        ):
            pass

    with pytest.raises(TrainerError, match=r"relay-0 found no node with .*'site_b': 1\.0"):
        asyncio.run(start())


KNOCK = """
import os, pathlib, socket, sys
for port in map(int, sys.argv[3:]):
    try:
        socket.create_connection((sys.argv[1], port), 5).close()
        print("connected", port)
    except PermissionError:
        print("refused", port)
print("files", [p.name for p in pathlib.Path(sys.argv[2]).glob("*")])
print("token", (pathlib.Path.home() / ".ray" / "auth_token").exists())
"""


def _listens_on() -> list[int]:
    """The ports of the Ray worker that runs this."""
    found = psutil.Process().net_connections("tcp")
    return [connection.laddr.port for connection in found if connection.status == "LISTEN"]


@pytest.mark.skipif(NO_WALL is not None, reason=f"this machine gives no walls: {NO_WALL}")
def test_agent_behind_a_wall_reaches_neither_ports_nor_files_nor_the_token_of_ray(
    tiny_model: Path, tmp_path: Path
) -> None:
    settings = config(tiny_model)

    async def knock() -> str:
        async with ray_cluster(settings, RunFolder.create(tmp_path / "a"), RunControl()) as cluster:
            (node,) = ray.nodes()
            of_worker = ray.get(ray.remote(_listens_on).options(num_cpus=0).remote())
            assert of_worker
            gcs = ray.get_runtime_context().gcs_address
            ports = {node["NodeManagerPort"], node["ObjectManagerPort"], int(gcs.split(":")[1])}
            paths = [str(path) for path in cluster.private_paths]
            host, sessions = ProcessHost(), paths[1]
            assert Path(sessions, "session_latest").exists()
            numbers = [str(port) for port in (*ports, *of_worker)]
            argv = [sys.executable, "-I", "-S", "-c", KNOCK, gcs.split(":")[0], sessions, *numbers]
            python = (sys.prefix, sys.base_prefix)
            work = tmp_path / "work"
            work.mkdir()
            behind = Wall(tuple(paths), cluster.private_ports(), show=(*python, str(work)))
            log, env = tmp_path / "log", {"HOME": str(work)}
            agent = Job(argv, cwd=work, env=env, log=log, timeout_s=60, wall=behind)
            assert (await host.run(agent)).failure is None, log.read_text()
            await host.close()
            return log.read_text()

    said = asyncio.run(knock())
    assert "connected" not in said
    assert said.count("refused") >= 4
    assert "files []" in said
    assert "token False" in said
