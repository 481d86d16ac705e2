"""Engines and proxy around a run: what ends is started anew, and what keeps ending ends the run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.fake_server import FakeServer
from tests.trainer.test_fit import config_of
from trainer.cluster.lead_rank import Progress
from trainer.cluster.local import LocalCluster
from trainer.cluster.local_engine import LocalReplica, engine_options
from trainer.cluster.trainer import Trainer
from trainer.errors import TrainerError
from trainer.run.control import RunControl
from trainer.run.folder import RunFolder
from trainer.run.services import running_services


class FakeCluster(LocalCluster):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.servers: list[FakeServer] = []

    def replica(self, number: int) -> LocalReplica:
        def make(options: Any) -> FakeServer:
            self.servers.append(FakeServer(options))
            return self.servers[-1]

        return LocalReplica(engine_options(self._config, self._folder, number), make)


class Connections:
    """The trainer's side: which engines it was given, and when it sent weights."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.trainer = Trainer(self._call)
        self.urls: Sequence[str] = ()

    async def _call(self, method: str, *args: Any) -> Any:
        if method == "connect":
            self.urls = args[0]
        self.calls.append((method, len(self.urls)))
        return Progress({}, 0, 0)


def test_an_engine_that_ends_is_replaced_with_the_weights_and_one_that_keeps_ending_is_an_error(
    tiny_model: Path, tmp_path: Path
) -> None:
    config = config_of(tiny_model, engine={"replicas": 2, "restarts": 1})
    folder, connections = RunFolder.create(tmp_path / "a"), Connections()
    told: asyncio.Queue[str] = asyncio.Queue()

    async def lose_engines() -> None:
        control = RunControl()
        cluster, trainer = FakeCluster(config, folder, control), connections.trainer
        async with running_services(
            config, folder, control, cluster, trainer, told.put_nowait
        ) as proxy:
            first = {engine["name"]: engine["url"] for engine in await proxy.engines()}
            assert sorted(first) == ["engine-0", "engine-1"]
            lost = next(server for server in cluster.servers if server.url == first["engine-1"])
            lost.kill()
            assert (await told.get()).startswith("warning: engine-1 ended with exit code 137")
            now: dict[str, str] = {}
            while len(now) < 2 or len(cluster.servers) < 3:
                now = {engine["name"]: engine["url"] for engine in await proxy.engines()}
            assert now == {"engine-0": first["engine-0"], "engine-1": cluster.servers[-1].url}
            assert connections.calls == [("connect", 2), ("connect", 2), ("sync_weights", 2)]
            cluster.servers[-1].kill()
            await control.finish(asyncio.sleep(60))

    with pytest.raises(TrainerError, match=r"engine-1 ended 2 times \(engine\.restarts\)"):
        asyncio.run(lose_engines())
