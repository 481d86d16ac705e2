"""Updates of engines that end at any moment, and of a proxy that is being restarted."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from proxy.client import ProxyClient, ProxyClientError
from proxy.errors import EngineError
from proxy.records import ServedPolicy
from tests.trainer.test_two_policies import proxy_of
from trainer.cluster.cluster import ProxyService
from trainer.cluster.engines import RunEngines
from trainer.cluster.rank_zero import Connect, RankRequest, RankZero, SentWeights, SyncWeights
from trainer.errors import TrainerError, WeightSyncError
from trainer.run.folder import RunFolder


class AdapterTrainer:
    """Rank 0 of a run that trains an adapter, as the engines see it."""

    def __init__(self) -> None:
        self.served = ServedPolicy("planner", 7, "planner@7.aa")
        self.log: list[str] = []
        """The requests and the published versions, in their order."""
        self.rank_zero = RankZero(self._serve)
        self.dead = ""
        """The URL of an engine that does not answer."""
        self.unreachable = ""
        """The URL of an engine to which it cannot be connected."""
        self.failed = asyncio.Event()
        """Set when an update has failed for it."""
        self._urls: Sequence[str] = ()

    async def _serve(self, request: RankRequest[Any]) -> Any:
        self.log.append(type(request).__name__)
        if isinstance(request, Connect):
            self._urls = request.engine_urls
            if self.unreachable in self._urls:
                raise WeightSyncError(f"{self.unreachable} does not answer")
            return None
        assert isinstance(request, SyncWeights)
        if self.dead in self._urls:
            self.failed.set()
            raise WeightSyncError(f"{self.dead} does not answer")
        return SentWeights({}, (self.served,))


class DyingReplica:
    def __init__(self, number: int = 0) -> None:
        self.url = f"http://127.0.0.1:{number + 1}"
        self.starts = 0
        self.failures = 0
        """How many starts fail."""
        self.at_start: Callable[[], None] = lambda: None
        self.lost = asyncio.Event()
        self.may_start = asyncio.Event()
        self.started = asyncio.Event()

    async def start(self) -> None:
        await self.may_start.wait()
        if self.failures:
            self.failures -= 1
            raise EngineError("no memory")
        self.starts += 1
        self.at_start()
        self.started.set()

    async def wait(self) -> str:
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
        self.engines: set[str] = set()
        self.removed = asyncio.Event()
        self.added = asyncio.Event()
        """Set when a replacement has the weights."""
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
        self.added.set()
        self._answer("add_engine")
        self.engines.add(name)

    async def publish_policy(self, name: str, version: int, adapter: str, run: str) -> None:
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
    """A run whose processes are scripted."""

    def __init__(self, patience_s: float = 20.0, replicas: int = 1) -> None:
        self.trainer = AdapterTrainer()
        self.proxy = ScriptedProxy(self.trainer.log)
        self.replicas = [DyingReplica(number) for number in range(replicas)]
        self.replica = self.replicas[0]
        self.engines = RunEngines(
            self.trainer.rank_zero, self.replicas, restarts=3, proxy_patience_s=patience_s
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
        await run.proxy.added.wait()
    name = run.trainer.served.adapter
    assert run.trainer.log == ["SyncWeights", name, "Connect", "SyncWeights", name]


async def test_replacement_that_gets_a_new_version_publishes_it() -> None:
    """An engine ended before the update, which fails: the version reaches the replacement."""
    run = Run()
    async with run.keeping():
        run.replica.may_start.set()
        run.replica.lost.set()
        await run.proxy.added.wait()
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
        again = asyncio.create_task(run.proxy.added.wait())
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


async def test_engine_that_ends_while_another_is_replaced_is_replaced_too() -> None:
    """It does not answer any more, but its end is not known yet."""
    run = Run(replicas=2)
    one, two = run.replicas
    async with run.keeping() as kept:
        run.trainer.dead = two.url
        one.may_start.set()
        one.lost.set()
        await run.trainer.failed.wait()
        two.lost.set()
        await run.proxy.added.wait()
        assert run.proxy.engines == {"engine-0"}
        assert run.trainer.log[-3:] == ["Connect", "SyncWeights", run.trainer.served.adapter]
        run.trainer.dead = ""
        run.proxy.added.clear()
        two.may_start.set()
        await run.proxy.added.wait()
        assert not kept.done()
    assert run.proxy.engines == {"engine-0", "engine-1"}


async def test_replacement_that_ends_before_it_has_the_weights_is_replaced() -> None:
    run = Run()
    async with run.keeping() as kept:
        run.trainer.dead = run.replica.url
        run.replica.may_start.set()
        run.replica.lost.set()
        await run.trainer.failed.wait()
        run.trainer.dead = ""
        run.replica.lost.set()
        await run.proxy.added.wait()
        assert not kept.done()
    assert run.replica.starts == 2


async def test_replacement_that_does_not_start_is_started_again() -> None:
    run = Run()
    run.replica.failures = 2
    async with run.keeping() as kept:
        run.replica.may_start.set()
        run.replica.lost.set()
        await run.proxy.added.wait()
        assert not kept.done()
    assert run.replica.starts == 1


async def test_replacement_whose_starts_fail_too_often_ends_the_run() -> None:
    run = Run()
    run.replica.failures = 3
    async with run.keeping() as kept:
        run.replica.may_start.set()
        run.replica.lost.set()
        with pytest.raises(TrainerError, match=r"engine-0 ended 4 times .*: no memory"):
            await kept


async def test_engine_that_ends_before_the_trainer_is_connected_is_started_again() -> None:
    run = Run()
    run.trainer.unreachable = run.replica.url
    run.replica.may_start.set()
    run.replica.lost.set()
    run.replica.at_start = lambda: setattr(run.trainer, "unreachable", "")
    await run.engines.connect()
    assert run.trainer.log == ["Connect", "Connect"]
    assert run.replica.starts == 1


async def test_engine_that_runs_and_cannot_be_connected_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer.cluster.engines.ENGINE_END_KNOWN_S", 0.0)
    run = Run()
    run.trainer.unreachable = run.replica.url
    with pytest.raises(WeightSyncError, match="does not answer"):
        await run.engines.connect()


async def test_replacement_that_refuses_the_weights_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer.cluster.engines.ENGINE_END_KNOWN_S", 0.0)
    run = Run()
    async with run.keeping() as kept:
        run.trainer.dead = run.replica.url
        run.replica.may_start.set()
        run.replica.lost.set()
        with pytest.raises(WeightSyncError, match="does not answer"):
            await kept


async def test_policy_of_a_run_is_refused_to_another_run_until_the_first_has_ended(
    tiny_model: Path, tmp_path: Path
) -> None:
    def of_run(name: str, proxy: ProxyClient) -> RunEngines:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        run_id = RunFolder(folder).run_id
        engines = RunEngines(AdapterTrainer().rank_zero, given_urls=["http://a"], run=run_id)
        engines.proxy = proxy
        return engines

    async with proxy_of(tiny_model, "http://127.0.0.1:9", tmp_path) as proxy:
        first, second = of_run("first", proxy), of_run("second", proxy)
        await first.send_weights()
        with pytest.raises(
            ProxyClientError, match=r"'planner' belongs to the run 'first-"
        ) as error:
            await second.send_weights()
        assert error.value.status == 409
        await second.release_policies()
        resumed = of_run("first", proxy)
        await resumed.send_weights()
        await resumed.release_policies()
        await second.send_weights()
        (served,) = await proxy.policies()
        assert served.run == RunFolder(tmp_path / "second").run_id
