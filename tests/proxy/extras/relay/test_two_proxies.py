"""Several proxies on one store, each with relay workers of its own, serve the same weights."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import SecretStr

from proxy.client import ProxyClient
from proxy.control.policies import PublishedPolicies
from proxy.extras.relay.hub import RelayHub
from tests.postgres_server import empty_database
from tests.proxy.conftest import ADMIN_KEY, StartProxy
from tests.proxy.extras.relay.conftest import TOKEN, WAIT_S, Relay, StartWorker
from tests.proxy.extras.relay.weights_engine import Publications, WeightsEngine

POLICY = "shop"


@pytest.fixture
async def second_engine() -> AsyncIterator[WeightsEngine]:
    async with WeightsEngine(lambda _: []) as engine:
        yield engine


@pytest.fixture
async def store(postgres: str) -> str:
    return await empty_database(postgres)


StartRelay = Any


@pytest.fixture
async def start_relay(
    start_proxy: StartProxy,
    start_worker: StartWorker,
    published: Publications,
    checkpoint: Path,
    store: str,
) -> StartRelay:
    async def start(engine: WeightsEngine) -> Relay:
        token = {"token": SecretStr(TOKEN), "grace_s": 0.2}
        proxy = await start_proxy(engine=engine, relay=token, store=store)
        (own,) = await proxy.control.engines()
        await proxy.control.remove_engine(own["name"])
        return Relay(proxy, start_worker, published, checkpoint)

    return start


@pytest.fixture
async def pair(
    start_relay: StartRelay, engine: WeightsEngine, second_engine: WeightsEngine, tmp_path: Path
) -> list[Relay]:
    """Two proxies, each with a worker of its own."""
    relays = []
    for number, each in enumerate((engine, second_engine)):
        relay = await start_relay(each)
        await relay.worker(each, tmp_path / f"weights-{number}", name=f"gpu-{number}")
        relays.append(relay)
    return relays


async def everyone(relay: Relay) -> dict[str, tuple[int, bool]]:
    """Name of each worker, of all proxies → its version, and whether it serves the wanted one."""
    view = await relay.proxy.control.weights(wait_s=WAIT_S)
    assert view["settled"], view
    return {each["name"]: (each["version"], each["serves_wanted"]) for each in view["workers"]}


async def test_weights_that_one_proxy_gets_are_pulled_by_the_workers_of_both(
    pair: list[Relay], engine: WeightsEngine, second_engine: WeightsEngine
) -> None:
    one, two = pair
    for version, relay in ((1, one), (2, two)):
        await relay.announce(one.published.add(version, f"weights {version}".encode()))
        for each in pair:
            assert await everyone(each) == {"gpu-0": (version, True), "gpu-1": (version, True)}
            assert await each.chat() == (200, [version])
        assert engine.label == second_engine.label == str(version)


async def test_a_proxy_that_hears_of_newer_weights_while_it_waits_does_not_wait_for_the_older(
    pair: list[Relay], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = pair
    first = one.published.add(1, b"first")
    await one.announce(first)
    await everyone(two)
    hears, asked = asyncio.Event(), asyncio.Event()
    restore, settle = PublishedPolicies.restore, RelayHub.until_settled

    async def hears_late(policies: PublishedPolicies) -> None:
        await hears.wait()
        await restore(policies)

    async def is_asked(hub: RelayHub, until: float, *which: str, **more: Any) -> None:
        if which == (first,):  # by the other proxy
            asked.set()
        await settle(hub, until, *which, **more)

    monkeypatch.setattr(PublishedPolicies, "restore", hears_late)
    monkeypatch.setattr(RelayHub, "until_settled", is_asked)
    await two.announce(two.published.add(2, b"second"))
    waiting = asyncio.create_task(everyone(one))
    await asked.wait()
    hears.set()
    async with asyncio.timeout(WAIT_S / 2):
        assert await waiting == {"gpu-0": (2, True), "gpu-1": (2, True)}


async def test_a_run_at_one_proxy_waits_for_the_workers_of_the_other_which_sample_meanwhile(
    pair: list[Relay],
) -> None:
    one, two = pair
    await one.announce(one.published.add(1, b"first"))
    await everyone(one)
    name, server = one.published.add(2, b"second"), one.published.server
    server.hold(one.published.file(name))
    await one.announce(name)
    await server.asked.wait()
    assert await two.chat() == (200, [1])
    view = await one.proxy.control.weights(wait_s=0.2)
    assert not view["settled"]
    server.release()
    assert await everyone(one) == {"gpu-0": (2, True), "gpu-1": (2, True)}
    assert await two.chat() == (200, [2])


async def test_adapter_is_named_to_no_engine_that_has_not_loaded_it(pair: list[Relay]) -> None:
    one, two = pair
    for version, relay in ((1, one), (2, two), (3, one)):
        name, served = one.published.add_adapter(version, -1.0 - version / 10, base=-1.0)
        await relay.announce(name)
        assert {serves for _, serves in (await everyone(relay)).values()} == {True}
        await relay.proxy.control.publish_policy(POLICY, version, served)
        assert await relay.chat(POLICY) == (200, [version])
        other = two if relay is one else one
        async with asyncio.timeout(WAIT_S):
            while (await other.chat(POLICY)) != (200, [version]):  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # until the store has notified it


async def test_types_are_those_of_the_engines_at_both(
    pair: list[Relay], engine: WeightsEngine, second_engine: WeightsEngine
) -> None:
    one, two = pair
    engine.held, second_engine.held = ["bfloat16"], ["float32"]
    for each in (one, two):
        types = await each.proxy.control.held_types([("w", "float32", [4])])
        assert sorted(types["held_dtypes"]) == [["bfloat16"], ["float32"]]


async def test_run_whose_only_worker_is_at_the_other_proxy_goes_on(
    start_relay: StartRelay, engine: WeightsEngine, second_engine: WeightsEngine, tmp_path: Path
) -> None:
    one, two = await start_relay(engine), await start_relay(second_engine)
    await two.worker(second_engine, tmp_path / "weights")
    await one.announce(one.published.add(1, b"first"))
    async with asyncio.timeout(20):  # does not wait for a worker of its own
        assert await everyone(one) == {"gpu-0": (1, True)}


class Balancer:
    """An address behind which there is one of several proxies, as of a load balancer."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = ""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(
            _forward(reader, there[1]), _forward(there[0], writer), return_exceptions=True
        )


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while part := await reader.read(1 << 16):
            writer.write(part)
            await writer.drain()
    finally:
        writer.close()


async def test_proxy_that_is_killed_in_an_update_loses_no_worker(
    start_relay: StartRelay,
    engine: WeightsEngine,
    store: str,
    checkpoint: Path,
    tmp_path: Path,
) -> None:
    """Its worker comes back to the other proxy, with the update that it was pulling."""
    other = await start_relay(engine)
    config = {
        "model": str(checkpoint),
        "store": store,
        "admin_key": ADMIN_KEY,
        "port": 0,
        "relay": {"token": TOKEN},
    }
    (tmp_path / "proxy.yaml").write_text(yaml.safe_dump(config))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "proxy", "serve", "--config", str(tmp_path / "proxy.yaml")),
        stdout=asyncio.subprocess.PIPE,
        env=dict(os.environ),
    )
    assert process.stdout is not None
    try:
        found = re.search(rb"http://[\d.]+:(\d+)", await process.stdout.readline())
        assert found is not None
        port = int(found[1])
        balancer = Balancer(port)
        listening = await asyncio.start_server(balancer.answer, "127.0.0.1", 0)
        address = f"ws://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        published = other.published
        await other.worker(engine, tmp_path / "weights", proxy=address)
        async with ProxyClient(f"http://127.0.0.1:{port}", ADMIN_KEY) as killed:
            await killed.publish_weights(publication=published.add(1, b"first"), version=1)
            view = await killed.weights(wait_s=WAIT_S)
            assert [each["version"] for each in view["workers"]] == [1]
            name = published.add(2, b"second")
            published.server.hold(published.file(name))
            await killed.publish_weights(publication=name, version=2)
        await published.server.asked.wait()
    finally:
        process.send_signal(signal.SIGKILL)
        await process.wait()
    balancer.port = int(other.proxy.url.rpartition(":")[2])
    async with asyncio.timeout(WAIT_S):
        while not await other.proxy.control.engines():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert await other.chat() == (200, [1])  # until it has the new ones
    published.server.release()
    assert await everyone(other) == {"gpu-0": (2, True)}
    assert await other.chat() == (200, [2])
    listening.close()
