"""A hub in this process, and workers in processes of their own (`eager_worker.py`)."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from aiohttp import web
from pydantic import SecretStr

from proxy.engines.protocol import Chunk, Sampling
from proxy.extras.relay.engine import RelayEngine
from proxy.extras.relay.fingerprint import fingerprint
from proxy.extras.relay.hub import RelayHub
from proxy.extras.relay.protocol import PATH
from proxy.extras.relay.section import RelayConfig
from proxy.testing.scripted_engine import ScriptedEngine
from tests.file_server import serving_files
from tests.proxy.conftest import RunningProxy, StartProxy
from tests.proxy.extras.relay.weights_engine import Publications, WeightsEngine
from tests.proxy.pushed import chunks_of

TOKEN = "a-token-of-the-relay"
PROMPT = np.array([11, 12, 13], np.int32)
ANSWER = [*range(100, 160), 2]
CHAT = "chat/completions"
WAIT_S = 60.0


def sample(
    engine: RelayEngine, *, request_id: str = "r-1", stream: bool = True, **sampling: object
) -> AsyncIterator[Chunk]:
    wanted = Sampling(**{"max_tokens": 100, **sampling})  # type: ignore[arg-type]
    return chunks_of(engine, PROMPT, wanted, request_id=request_id, cache_salt="s", stream=stream)


async def ids_of(chunks: AsyncIterator[Chunk]) -> list[int]:
    return [i async for chunk in chunks for i in chunk.ids]


@dataclass
class Proxy:
    """A listening hub, and the engines that joined it."""

    runner: web.BaseRunner
    port: int
    joined: asyncio.Queue[RelayEngine] = field(default_factory=asyncio.Queue)
    left: asyncio.Queue[str] = field(default_factory=asyncio.Queue)

    async def stop(self) -> None:
        await self.runner.cleanup()

    async def worker(self) -> RelayEngine:
        """The next worker, once it is connected."""
        async with asyncio.timeout(20):
            engine = await self.joined.get()
            await engine.probe()
        return engine


OpenProxy = Callable[..., Awaitable[Proxy]]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", {"a": 0})


def write_model(folder: Path, vocabulary: dict[str, int]) -> Path:
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(orjson.dumps({"model": {"vocab": vocabulary}}))
    (folder / "config.json").write_bytes(orjson.dumps({"hidden_size": 64}))
    return folder


@pytest.fixture
async def open_proxy(model: Path) -> AsyncIterator[OpenProxy]:
    runners: list[web.AppRunner] = []

    async def start(host: str = "127.0.0.1", port: int = 0, **limits: float) -> Proxy:
        hub = RelayHub(
            RelayConfig(token=TOKEN, **limits),
            fingerprint(model),
            joined=lambda engine: proxy.joined.put(engine),
            left=lambda name: proxy.left.put(name),
        )
        app = web.Application()
        app.router.add_get(PATH, hub.connect)
        app.on_shutdown.append(lambda _: hub.close())
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await runner.setup()
        runners.append(runner)
        await web.TCPSite(runner, host, port).start()
        proxy = Proxy(runner, runner.addresses[0][1])
        return proxy

    yield start
    for runner in runners:
        await runner.cleanup()


@pytest.fixture
async def server() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(lambda _: ANSWER) as engine:
        yield engine


class Worker:
    """A worker's process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def says(self, words: str) -> None:
        """Waits until the worker has written a line with `words`."""
        assert self.process.stdout is not None
        while words not in (line := (await self.process.stdout.readline()).decode()):
            assert line, f"the worker ended and never said {words!r}"

    async def ended(self) -> str:
        """Waits until the worker has ended by itself; returns its last line."""
        assert self.process.stdout is not None
        async with asyncio.timeout(20):
            output = await self.process.stdout.read()
            await self.process.wait()
        return output.decode().strip().splitlines()[-1]


StartWorker = Callable[..., Awaitable[Worker]]


@pytest.fixture
async def start_worker(server: ScriptedEngine, model: Path) -> AsyncIterator[StartWorker]:
    started: list[Worker] = []

    async def start(
        proxy: Proxy | None,
        *flags: str,
        token: str | None = TOKEN,
        model: Path = model,
        name: str = "gpu-0",
        url: str | None = None,
        engine: str | None = None,
        wrapper: tuple[str, ...] = (),
    ) -> Worker:
        process = await asyncio.create_subprocess_exec(
            *wrapper,
            *(sys.executable, "-m", "tests.proxy.extras.relay.eager_worker"),
            *("--proxy", url or f"ws://127.0.0.1:{proxy.port if proxy else 0}"),
            *("--engine", engine or server.url, "--model", str(model), "--name", name),
            *flags,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=dict(os.environ) | ({"AGENTIC_WORKER_TOKEN": token} if token else {}),
        )
        started.append(Worker(process))
        return started[-1]

    yield start
    for worker in started:
        if worker.process.returncode is None:
            worker.process.kill()
            await worker.process.communicate()


@pytest.fixture
async def engine() -> AsyncIterator[WeightsEngine]:
    async with WeightsEngine(lambda _: []) as engine:
        yield engine


@pytest.fixture
async def published(tmp_path: Path) -> AsyncIterator[Publications]:
    async with serving_files(tmp_path / "published", "127.0.0.1") as server:
        yield Publications(tmp_path / "published", server)


class Relay:
    """A proxy whose only engines are workers."""

    def __init__(
        self,
        proxy: RunningProxy,
        start_worker: StartWorker,
        published: Publications,
        checkpoint: Path,
    ) -> None:
        self.proxy = proxy
        self.published = published
        self._start_worker = start_worker
        self._checkpoint = checkpoint

    async def worker(
        self,
        engine: ScriptedEngine,
        folder: Path,
        *,
        url: str = "",
        name: str = "gpu-0",
        proxy: str = "",
    ) -> Worker:
        """A worker that has connected; `proxy` is the address at which it does, if not the
        proxy's own."""
        where = url or self.published.server.url
        worker = await self._start_worker(
            None,
            *("--weights-folder", str(folder)),
            *(() if where == "none" else ("--weights-url", where)),
            url=proxy or self.proxy.url.replace("http", "ws"),
            name=name,
            engine=engine.url,
            model=self._checkpoint,
        )
        async with asyncio.timeout(20):
            await worker.says("connected to")
        return worker

    async def announce(self, name: str, **more: Any) -> None:
        version = int(name.partition("/v")[2][:6])
        await self.proxy.control.publish_weights(publication=name, version=version, **more)

    async def settled(self) -> dict[str, Any]:
        """What the only worker says when it serves the weights, or has failed to."""
        view = await self.proxy.control.weights(wait_s=WAIT_S)
        assert view["settled"], view
        (worker,) = view["workers"]
        return dict(worker)

    async def serves(self) -> dict[str, Any]:
        """What the only worker says when it serves the wanted weights."""
        async with asyncio.timeout(WAIT_S):
            while not (worker := await self.settled())["serves_wanted"]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        return worker

    async def is_healthy(self) -> bool:
        (engine,) = await self.proxy.control.engines()
        return bool(engine["healthy"])

    async def chat(self, policy: str = "") -> tuple[int, list[int]]:
        """The status of a call, and the versions of its answer."""
        session = await self.proxy.session(policies={"": policy} if policy else None)
        body = {"model": "m", "messages": [{"role": "user", "content": "Hi."}]}
        status, _ = await self.proxy.post(session, CHAT, body)
        _, turns = await self.proxy.record(session)
        return status, [span.version for turn in turns for span in turn.versions]


@pytest.fixture
async def relay(
    start_proxy: StartProxy,
    start_worker: StartWorker,
    engine: WeightsEngine,
    published: Publications,
    checkpoint: Path,
) -> Relay:
    proxy = await start_proxy(engine=engine, relay={"token": SecretStr(TOKEN), "grace_s": 0.2})
    (own,) = await proxy.control.engines()
    await proxy.control.remove_engine(own["name"])
    return Relay(proxy, start_worker, published, checkpoint)
