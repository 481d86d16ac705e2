"""The relay over a failing network, in a network namespace of its own."""

from __future__ import annotations

import asyncio
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from proxy.errors import EngineError
from proxy.extras.relay.engine import RelayEngine
from proxy.testing.scripted_engine import ScriptedEngine
from tests.namespaces import ip, may_be_refused
from tests.proxy.extras.relay.conftest import ANSWER, OpenProxy, StartWorker, ids_of, sample


class Cable:
    """A virtual network cable between this machine (`.1`) and a namespace (`.2`)."""

    def __init__(self, tag: str) -> None:
        self.namespace, self._end = f"relay-{tag}", f"relay-{tag}"
        subnet = f"10.231.{int(tag, 16) % 250}"
        self.near, self.far = f"{subnet}.1", f"{subnet}.2"

    def lay(self) -> None:
        ip("netns", "add", self.namespace)
        ip("link", "add", self._end, "type", "veth", "peer", "eth0", "netns", self.namespace)
        ip("addr", "add", f"{self.near}/24", "dev", self._end)
        ip("link", "set", self._end, "up")
        ip("-n", self.namespace, "addr", "add", f"{self.far}/24", "dev", "eth0")
        ip("-n", self.namespace, "link", "set", "eth0", "up")
        ip("-n", self.namespace, "link", "set", "lo", "up")

    def pull(self) -> None:
        """Drops all packets from now on, without closing connections."""
        ip("-n", self.namespace, "link", "set", "eth0", "down")

    def plug(self) -> None:
        ip("-n", self.namespace, "link", "set", "eth0", "up")

    def remove(self) -> None:
        ip("netns", "delete", self.namespace)


@pytest.fixture
def cable() -> Iterator[Cable]:
    cable = Cable(secrets.token_hex(4))
    with may_be_refused():
        cable.lay()
    yield cable
    cable.remove()


@asynccontextmanager
async def engine_in(cable: Cable, *flags: str) -> AsyncIterator[str]:
    """The scripted engine as a process in the namespace, on the worker's side."""
    process = await asyncio.create_subprocess_exec(
        *(
            "ip",
            "netns",
            "exec",
            cable.namespace,
            sys.executable,
            "-m",
            "proxy.testing.scripted_engine",
        ),
        *flags,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        yield (await process.stdout.readline()).decode().strip()
    finally:
        process.kill()
        await process.communicate()


async def connection_lost(engine: RelayEngine) -> None:
    with pytest.raises(EngineError, match="lost its connection"):
        await engine.probe(timeout_s=30)


async def test_generation_continues_after_a_network_outage(
    cable: Cable, open_proxy: OpenProxy, start_worker: StartWorker
) -> None:
    proxy = await open_proxy(host="0.0.0.0", silence_s=1.0, grace_s=60)
    async with engine_in(cable, "--answer-tokens", "200", "--token-delay-s", "0.01") as url:
        await start_worker(
            proxy,
            *("--silence-s", "1"),
            url=f"ws://{cable.near}:{proxy.port}",
            engine=url,
            wrapper=("ip", "netns", "exec", cable.namespace),
        )
        engine = await proxy.worker()
        chunks = sample(engine, max_tokens=200)
        read = list((await anext(chunks)).ids)
        cable.pull()
        await connection_lost(engine)
        assert not engine.info.healthy
        cable.plug()
        read += await ids_of(chunks)
        assert read == [7] * 199 + [2]
        assert engine.info.healthy
        assert proxy.joined.empty()


async def test_calls_are_cut_if_the_network_stays_down(
    cable: Cable, open_proxy: OpenProxy, start_worker: StartWorker
) -> None:
    proxy = await open_proxy(host="0.0.0.0", silence_s=1.0, grace_s=0.5)
    async with engine_in(cable, "--answer-tokens", "2000", "--token-delay-s", "0.02") as url:
        await start_worker(
            proxy,
            *("--silence-s", "1"),
            url=f"ws://{cable.near}:{proxy.port}",
            engine=url,
            wrapper=("ip", "netns", "exec", cable.namespace),
        )
        engine = await proxy.worker()
        chunks = sample(engine, max_tokens=2000)
        await anext(chunks)
        cable.pull()
        async with asyncio.timeout(20):
            with pytest.raises(EngineError, match=r"did not reconnect within 0\.5 s"):
                await ids_of(chunks)
        cable.plug()
        assert await (await proxy.worker()).probe()


async def test_call_of_a_stopped_worker_continues_when_it_resumes(
    open_proxy: OpenProxy, start_worker: StartWorker, server: ScriptedEngine
) -> None:
    proxy = await open_proxy(silence_s=0.5, grace_s=60)
    worker = await start_worker(proxy)
    engine = await proxy.worker()
    server.token_delay_s = 0.01
    chunks = sample(engine)
    read = list((await anext(chunks)).ids)
    worker.signal(signal.SIGSTOP)
    await connection_lost(engine)
    worker.signal(signal.SIGCONT)
    read += await ids_of(chunks)
    assert read == ANSWER
    assert len(server.calls) == 1


async def test_worker_reconnects_to_a_restarted_proxy(
    open_proxy: OpenProxy, start_worker: StartWorker, server: ScriptedEngine
) -> None:
    first = await open_proxy()
    await start_worker(first)
    engine = await first.worker()
    server.token_delay_s = 0.2
    chunks = sample(engine)
    await anext(chunks)
    await first.stop()
    with pytest.raises(EngineError, match="the proxy is stopping"):
        await ids_of(chunks)
    second = await open_proxy(port=first.port)
    assert await ids_of(sample(await second.worker(), max_tokens=1)) == ANSWER[:1]
    assert [call.finish_reason for call in server.calls] == ["abort", "length"]
