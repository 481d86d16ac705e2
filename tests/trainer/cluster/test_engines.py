"""Updates of engines that end at any moment, and of a proxy that is being restarted."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from proxy.client import ProxyClient, ProxyClientError
from proxy.records import ServedPolicy
from trainer.cluster.cluster import ProxyService
from trainer.cluster.engines import RunEngines
from trainer.cluster.rank_zero import Connect, RankRequest, RankZero, SentWeights, SyncWeights


class AdapterTrainer:
    """Rank 0 of a run that trains an adapter, as the engines see it."""

    def __init__(self) -> None:
        self.served = ServedPolicy("planner", 7, "planner@7.aa")
        self.log: list[str] = []
        """The requests and the published versions, in their order."""
        self.rank_zero = RankZero(self._serve)

    async def _serve(self, request: RankRequest[Any]) -> Any:
        self.log.append(type(request).__name__)
        if isinstance(request, Connect):
            return None
        assert isinstance(request, SyncWeights)
        return SentWeights({}, self.served)


class DyingReplica:
    url = "http://127.0.0.1:1"

    def __init__(self) -> None:
        self.lost = asyncio.Event()
        self.may_start = asyncio.Event()
        self.started = asyncio.Event()
        self.kept_again = asyncio.Event()
        """Set when the replacement is in use and its end is awaited."""

    async def start(self) -> None:
        await self.may_start.wait()
        self.started.set()

    async def wait(self) -> str:
        if self.started.is_set():
            self.kept_again.set()
        await self.lost.wait()
        self.lost.clear()
        return "exit code 1"

    async def stop(self) -> None:
        pass


class ScriptedProxy:
    """The proxy's control plane: it fails as many calls of each name as `failures` says."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.failures: dict[str, list[int]] = {}
        """Name of a call → the status of each of its failures; 0: no answer."""
        self.calls = Counter[str]()
        self.removed = asyncio.Event()
        self.publishing = asyncio.Event()
        self.answering = asyncio.Event()
        """`publish_policy` waits until this is set."""
        self.answering.set()

    async def set_engines(self, engines: object) -> None:
        pass

    async def remove_engine(self, name: str) -> None:
        self._answer("remove_engine")
        self.removed.set()

    async def add_engine(self, url: str, *, name: str) -> None:
        self._answer("add_engine")

    async def publish_policy(self, name: str, version: int, adapter: str) -> None:
        self.publishing.set()
        await self.answering.wait()
        self._answer("publish_policy")
        self.log.append(adapter)

    def _answer(self, call: str) -> None:
        self.calls[call] += 1
        if left := self.failures.get(call):
            status = left.pop(0)
            raise ProxyClientError(f"status {status}", status)


class Run:
    """A run with one engine, whose processes are scripted."""

    def __init__(self, patience_s: float = 20.0) -> None:
        self.trainer = AdapterTrainer()
        self.proxy = ScriptedProxy(self.trainer.log)
        self.replica = DyingReplica()
        self.engines = RunEngines(
            self.trainer.rank_zero, [self.replica], restarts=3, proxy_patience_s=patience_s
        )

    @asynccontextmanager
    async def keeping(self) -> AsyncIterator[asyncio.Task[None]]:
        client = cast("ProxyClient", self.proxy)
        await self.engines.connect()
        self.trainer.log.clear()
        self.engines.proxy = client
        task = asyncio.create_task(
            self.engines.keep_running(cast("ProxyService", self.proxy), client)
        )
        yield task
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_version_is_published_before_another_engine_is_connected() -> None:
    """An engine's replacement starts during an update. Its connection waits until the version that
    the others got is published; so no older version can be published after it."""
    run = Run()
    async with run.keeping():
        run.replica.lost.set()
        await run.proxy.removed.wait()
        run.proxy.answering.clear()
        sending = asyncio.create_task(run.engines.send_weights())
        await run.proxy.publishing.wait()
        run.replica.may_start.set()
        await run.replica.started.wait()
        run.proxy.answering.set()
        await sending
        await run.replica.kept_again.wait()
    name = run.trainer.served.adapter
    assert run.trainer.log == ["SyncWeights", name, "Connect", "SyncWeights", name]


async def test_replacement_that_gets_a_new_version_publishes_it() -> None:
    """An engine ended before the update, which fails: the version reaches the replacement."""
    run = Run()
    async with run.keeping():
        run.replica.may_start.set()
        run.replica.lost.set()
        await run.replica.kept_again.wait()
    assert run.trainer.log == ["Connect", "SyncWeights", run.trainer.served.adapter]


@pytest.mark.parametrize("status", [0, 502, 503, 504])
async def test_update_waits_for_a_proxy_that_is_being_restarted(status: int) -> None:
    run = Run()
    run.proxy.failures = {"publish_policy": [status, status]}
    async with run.keeping():
        await run.engines.send_weights()
    assert run.trainer.log == ["SyncWeights", run.trainer.served.adapter]
    assert run.proxy.calls["publish_policy"] == 3


@pytest.mark.parametrize(("patience_s", "status"), [(0.0, 0), (20.0, 400)])
async def test_update_ends_if_the_proxy_stays_away_or_refuses_it(
    patience_s: float, status: int
) -> None:
    run = Run(patience_s)
    run.proxy.failures = {"publish_policy": [status]}
    async with run.keeping():
        with pytest.raises(ProxyClientError, match=f"status {status}"):
            await run.engines.send_weights()
    assert run.proxy.calls["publish_policy"] == 1


async def test_engine_is_replaced_while_the_proxy_is_restarted_with_the_new_engines() -> None:
    """The restarted proxy does not know the lost engine any more, and already has the new one."""
    run = Run()
    run.proxy.failures = {"remove_engine": [0, 404], "add_engine": [409]}
    async with run.keeping() as kept:
        run.replica.may_start.set()
        run.replica.lost.set()
        again = asyncio.create_task(run.replica.kept_again.wait())
        await asyncio.wait({kept, again}, return_when=asyncio.FIRST_COMPLETED)
        assert not kept.done()
    assert run.proxy.calls["remove_engine"] == 2


async def test_engine_that_the_proxy_refuses_ends_the_run() -> None:
    run = Run()
    run.proxy.failures = {"add_engine": [400]}
    async with run.keeping() as kept:
        run.replica.may_start.set()
        run.replica.lost.set()
        with pytest.raises(ProxyClientError, match="status 400"):
            await kept
