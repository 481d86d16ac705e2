"""A hub in this process, and workers in processes of their own (`python -m proxy.relay`)."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import orjson
import pytest
from aiohttp import web

from proxy.config import RelayConfig
from proxy.engines.protocol import Chunk, Sampling
from proxy.engines.scripted import ScriptedEngine
from proxy.relay.engine import RelayEngine
from proxy.relay.fingerprint import fingerprint
from proxy.relay.hub import RelayHub
from proxy.relay.protocol import PATH

TOKEN = "a-token-of-the-relay"
PROMPT = np.array([11, 12, 13], np.int32)
ANSWER = [*range(100, 160), 2]


def sample(
    engine: RelayEngine, *, request_id: str = "r-1", stream: bool = True, **sampling: object
) -> AsyncIterator[Chunk]:
    wanted = Sampling(**{"max_tokens": 100, **sampling})  # type: ignore[arg-type]
    return engine.generate(PROMPT, wanted, request_id=request_id, cache_salt="s", stream=stream)


async def ids_of(chunks: AsyncIterator[Chunk]) -> list[int]:
    return [i async for chunk in chunks for i in chunk.ids]


@dataclass
class Proxy:
    """A listening hub, and the engines that joined it."""

    runner: web.AppRunner
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
            RelayConfig(token=TOKEN, **limits),  # type: ignore[arg-type]
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
            *(sys.executable, "-m", "proxy.relay"),
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
