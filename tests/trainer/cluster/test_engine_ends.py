"""An engine that ends at any moment of an update, its first one included, is replaced, and both
engines then have the newest weights.

The moments are those of an undisturbed run: each request of the trainer to an engine, from the
connection to the end of the second update, before it is sent and while it waits for its answer.
"""

from __future__ import annotations

import asyncio
import itertools
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import pytest

from proxy.client import ProxyClient
from proxy.engines.address import EngineAddress
from tests.trainer.cluster.test_engines import ScriptedProxy
from tests.trainer.fake_server import FakeServer
from tests.trainer.test_fit import config_of, learner_of
from trainer.cluster.cluster import ProxyService
from trainer.cluster.engines import RunEngines
from trainer.cluster.local_engine import LocalReplica
from trainer.cluster.rank_zero import OneThread, RankZero
from trainer.cluster.replica_server import replica_server
from trainer.errors import TrainerError
from trainer.learning.learner import Learner
from trainer.learning.policies import Learners
from trainer.run.folder import RunFolder
from trainer.weight_sync.control import EngineControl

pytestmark = pytest.mark.slow

Way = Literal["killed", "dead", "deaf"]
"""`killed`: the server's process. `dead`: its engine process, so that it answers nothing but
`/health`, with 503. `deaf`: the same, but it has closed its port and ignores SIGTERM."""


@dataclass
class Victim:
    """The second engine, which ends once, `before` or `while` its N-th request."""

    way: Way
    moment: str
    request: int
    server: FakeServer | None = None
    routes: list[str] = field(default_factory=list)
    """The requests to it so far."""
    ended: bool = False

    def reached(self, moment: str, engine: str, path: str) -> None:
        if self.server is None or EngineAddress.parse(self.server.url).url != engine:
            return
        if moment == "before":
            self.routes.append(path)
        if self.ended or (self.moment, self.request) != (moment, len(self.routes)):
            return
        self.ended = True
        if self.way == "killed":
            self.server.kill()
            return
        address = EngineAddress.parse(self.server.url)
        route = "/die" if self.way == "dead" else "/die_deaf"
        request = urllib.request.Request(
            address.url + route, headers=dict(address.headers), method="POST"
        )
        urllib.request.urlopen(request, timeout=60).close()


@pytest.fixture(scope="module")
def learner(checkpoint: Path) -> Learner:
    engine = {"verify": True, "verify_tolerance": 1e6}  # the scripted engine is always certain
    learner = learner_of(config_of(checkpoint, engine=engine))
    learner.probe = list(range(1, 9))
    return learner


@pytest.fixture(autouse=True)
def in_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.engines.vllm_server.STOP_GRACE_S", 0.2)
    for module in ("trainer.cluster.local_engine", "trainer.weight_sync.control"):
        monkeypatch.setattr(f"{module}.HEALTH_INTERVAL_S", 0.1)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[[Victim], None]:
    """Lets a victim see every request to an engine."""
    seen = Victim("killed", "never", 0)
    call, waits = EngineControl._call, EngineControl._await_answer

    def called(self: Any, method: str, engine: str, path: str, body: Any) -> Any:
        seen_by[0].reached("before", engine, path)
        return call(self, method, engine, path, body)

    def waited(self: Any, connection: Any, method: str, engine: str, path: str) -> None:
        seen_by[0].reached("while", engine, path)
        waits(self, connection, method, engine, path)

    seen_by = [seen]
    monkeypatch.setattr(EngineControl, "_call", called)
    monkeypatch.setattr(EngineControl, "_await_answer", waited)
    return lambda victim: seen_by.__setitem__(0, victim)


class Engines:
    """Two engines of a run, the trainer, and a scripted proxy."""

    def __init__(self, learner: Learner, folder: RunFolder, victim: Victim) -> None:
        self.learner, self.victim = learner, victim
        self.starts: Counter[int] = Counter()
        self.said: list[str] = []
        self._folder = folder
        self._replicas = [LocalReplica(self._maker(number)) for number in (0, 1)]

    def _maker(self, number: int) -> Callable[[], FakeServer]:
        new_server = replica_server(self.learner.config, self._folder, number, FakeServer)

        def make() -> FakeServer:
            self.starts[number] += 1
            server = cast("FakeServer", new_server())
            if number == 1:
                self.victim.server = server
            return server

        return make

    async def two_updates(self) -> list[str]:
        """Connects, sends two versions, and returns when both engines run; the versions that they
        then have."""
        learner, proxy = self.learner, ScriptedProxy([])
        client, service = cast("ProxyClient", proxy), cast("ProxyService", proxy)
        with OneThread(Learners.of(learner)) as thread:
            engines = RunEngines(
                RankZero(thread.send), self._replicas, restarts=1, say=self.said.append
            )
            await asyncio.gather(*(replica.start() for replica in self._replicas))
            try:
                await engines.connect()
                engines.proxy = client
                keeping = asyncio.create_task(engines.keep_running(service, client))
                try:
                    for learner.version in (1, 2):
                        sending = asyncio.create_task(engines.send_weights())
                        await asyncio.wait({sending, keeping}, return_when=asyncio.FIRST_COMPLETED)
                        if not sending.done():
                            await keeping
                        await sending
                    if self.victim.ended:
                        await self._until_both_run(engines)
                    urls = engines.urls
                finally:
                    keeping.cancel()
                    await asyncio.gather(keeping, return_exceptions=True)
                control = EngineControl(urls)
                versions = await asyncio.to_thread(control.weight_versions)
                control.close()
                return versions
            finally:
                await engines.stop()

    async def _until_both_run(self, engines: RunEngines) -> None:
        async with engines._changed:
            await engines._changed.wait_for(lambda: self.starts[1] == 2 and len(engines.urls) == 2)


def moments(way: Way, requests: int) -> Iterator[tuple[str, int]]:
    """An engine that is only dead is found in the same way before and after a request is sent."""
    kinds = ("before", "while") if way == "killed" else ("while",)
    return itertools.product(kinds, range(1, requests + 1))


@pytest.mark.parametrize("way", [pytest.param("killed", marks=pytest.mark.long), "dead", "deaf"])
def test_engine_that_ends_at_any_moment_of_two_updates_is_replaced(
    learner: Learner, tmp_path: Path, watch: Callable[[Victim], None], way: Way
) -> None:
    def run(name: str, victim: Victim) -> tuple[Engines, list[str]]:
        watch(victim)
        engines = Engines(learner, RunFolder.create(tmp_path / name), victim)
        return engines, asyncio.run(asyncio.wait_for(engines.two_updates(), 60))

    undisturbed = Victim(way, "never", 0)
    _, versions = run("undisturbed", undisturbed)
    assert versions == ["2", "2"]
    routes = undisturbed.routes
    assert routes.count("/init_weight_transfer_engine") == 2
    assert routes.count("/inference/v1/generate") == 2
    broken: list[str] = []
    for moment, request in moments(way, len(routes) - 1):  # the last one is the test's own
        victim = Victim(way, moment, request)
        where = f"{moment} request {request}, {routes[request - 1]}"
        try:
            engines, versions = run(f"{moment}-{request}", victim)
        except (TrainerError, TimeoutError) as error:
            broken.append(f"{where}: {error!r}")
            continue
        if versions != ["2", "2"] or engines.starts[1] != 2:
            broken.append(f"{where}: {versions}, {engines.starts[1]} starts")
    assert not broken, "\n".join(broken)
