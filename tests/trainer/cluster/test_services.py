"""Engines and proxy around a run: a process that ends is replaced, until it ends too often."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from proxy.engines.address import EngineAddress
from tests.trainer.fake_engine import fake_engine
from tests.trainer.fake_server import FakeServer
from tests.trainer.test_fit import config_of
from trainer.cluster.local import LocalCluster
from trainer.cluster.local_engine import LocalReplica
from trainer.cluster.rank_zero import Connect, RankRequest, RankZero, SentWeights
from trainer.cluster.replica_server import replica_server
from trainer.cluster.services import RunServices
from trainer.errors import TrainerError
from trainer.run.control import RunControl
from trainer.run.folder import RunFolder

pytestmark = pytest.mark.slow


class FakeCluster(LocalCluster):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.servers: list[FakeServer] = []

    def replica(self, number: int) -> LocalReplica:
        new_server = replica_server(self._config, self._folder, number, FakeServer)

        def make() -> FakeServer:
            server = new_server()
            assert isinstance(server, FakeServer)
            self.servers.append(server)
            return server

        return LocalReplica(make)


class ScriptedTrainer:
    """The trainer's side: records which engines it is connected to, and when it sends weights."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, int]] = []
        self.rank_zero = RankZero(self._send)
        self.urls: Sequence[str] = ()
        self.adapters: Path | None = None

    async def _send(self, request: RankRequest[Any]) -> Any:
        if isinstance(request, Connect):
            self.urls, self.adapters = request.engine_urls, request.adapters
        self.requests.append((type(request).__name__, len(self.urls)))
        return SentWeights({})


def test_runs_proxy_loads_its_search(tiny_model: Path, tmp_path: Path) -> None:
    tools = {"web_search": "no_such_module:search"}
    config = config_of(tiny_model, proxy_server={"tools": tools})
    folder, control = RunFolder.create(tmp_path / "a"), RunControl()

    async def start() -> None:
        cluster = FakeCluster(config, folder, control)
        zero = ScriptedTrainer().rank_zero
        around = RunServices(config, folder, control, cluster, zero, lambda _: None)
        async with around.running():
            pytest.fail("the proxy has started")

    with pytest.raises(TrainerError, match="no_such_module"):
        asyncio.run(start())


def test_engine_that_ends_is_replaced_and_gets_the_weights_until_its_restarts_are_used_up(
    tiny_model: Path, tmp_path: Path
) -> None:
    engine, proxy_server = {"replicas": 2, "restarts": 1}, {"host": "127.0.0.2"}
    config = config_of(tiny_model, engine=engine, proxy_server=proxy_server)
    folder, trainer = RunFolder.create(tmp_path / "a"), ScriptedTrainer()
    messages: asyncio.Queue[str] = asyncio.Queue()

    async def lose_engines() -> None:
        control = RunControl()
        cluster = FakeCluster(config, folder, control)
        around = RunServices(
            config, folder, control, cluster, trainer.rank_zero, messages.put_nowait
        )
        async with around.running() as services:
            proxy = services.proxy
            assert proxy.base_url.startswith("http://127.0.0.2:")
            first = {engine["name"]: engine["url"] for engine in await proxy.engines()}
            assert sorted(first) == ["engine-0", "engine-1"]
            lost = next(
                server
                for server in cluster.servers
                if EngineAddress.parse(server.url).url == first["engine-1"]
            )
            lost.kill()
            assert (await messages.get()).startswith("warning: engine-1 ended with exit code 137")
            now: dict[str, str] = {}
            while len(now) < 2 or len(cluster.servers) < 3:
                now = {engine["name"]: engine["url"] for engine in await proxy.engines()}
            last = EngineAddress.parse(cluster.servers[-1].url).url
            assert now == {"engine-0": first["engine-0"], "engine-1": last}
            first_start = [("FreeMemory", 0), ("Connect", 2)]  # memory is freed before each start
            again = [("FreeMemory", 2), ("Connect", 2), ("SyncWeights", 2)]
            assert trainer.requests == first_start + again
            cluster.servers[-1].kill()
            await control.finish(asyncio.sleep(60))

    with pytest.raises(TrainerError, match=r"engine-1 ended 2 times \(engine\.restarts\)"):
        asyncio.run(lose_engines())


async def test_engines_get_the_adapters_folder_under_its_absolute_path(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 may be a Ray actor with another working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AGENTIC_PROXY_ADMIN_KEY", "a-key")
    with fake_engine() as (_, url):
        given = {"engine": {"urls": [url]}, "proxy_server": {"url": "http://127.0.0.1:1"}}
        config, folder = config_of(tiny_model, **given), RunFolder.create(Path("a"))
        trainer, control = ScriptedTrainer(), RunControl()
        cluster = FakeCluster(config, folder, control)
        around = RunServices(config, folder, control, cluster, trainer.rank_zero, print)
        async with around.running():
            pass
    assert trainer.adapters == tmp_path / "a" / "adapters"


def test_server_whose_engine_process_died_is_ended_and_reported(
    tiny_model: Path, tmp_path: Path
) -> None:
    config, folder = config_of(tiny_model), RunFolder.create(tmp_path / "a")
    cluster = FakeCluster(config, folder, RunControl())

    async def lose_the_engine_process() -> str:
        replica = cluster.replica(0)
        await replica.start()
        try:
            ended = asyncio.create_task(replica.wait())
            address = EngineAddress.parse(replica.url)
            request = urllib.request.Request(
                f"{address.url}/die", headers=dict(address.headers), method="POST"
            )
            await asyncio.to_thread(urllib.request.urlopen, request)
            return await ended
        finally:
            await replica.stop()

    assert "its engine process died" in asyncio.run(lose_the_engine_process())
