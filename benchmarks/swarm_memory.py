"""Memory of a swarm server over many episodes, and with many claims that wait.

The server is a process of its own; its trainer is a real proxy over a scripted engine that takes
batch after batch. `python -m benchmarks.swarm_memory` prints the rows of docs/notes/swarm.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from itertools import count
from pathlib import Path

import aiohttp
import psutil

from agent_loop.extras.swarm import AsyncSwarmClient
from agent_loop.extras.swarm.config import SwarmConfig
from agent_loop.extras.swarm.producer import SwarmProducer
from agent_loop.extras.swarm.token import client_token
from agent_loop.extras.swarm.trainer_process import server_of_trainer
from agent_loop.extras.swarm.wire import TrainerHello
from agent_loop.producers.rollout_config import RolloutConfig
from benchmarks.proxy.targets import write_checkpoint
from proxy.config import load_config
from proxy.process import listen
from proxy.testing.scripted_engine import ScriptedEngine

ADMIN_KEY = "admin-key-of-the-benchmark"
GROUP = 8
MAX_OPEN = 256
MEASUREMENTS = 10


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.swarm_memory", description=__doc__)
    parser.add_argument("--trainer", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--metadata-bytes", type=int, default=1_000, help="of each episode's end")
    parser.add_argument("--batch", type=int, default=512, help="episodes of a batch")
    parser.add_argument("--waiting", type=int, default=2_000, help="claims that wait at last")
    arguments = parser.parse_args()
    if arguments.trainer is not None:
        asyncio.run(_train(arguments.trainer, arguments.batch))
        return
    with tempfile.TemporaryDirectory() as scratch, _server(Path(scratch), arguments.batch) as at:
        asyncio.run(_measure(Path(scratch), *at, arguments))


@contextmanager
def _server(folder: Path, batch: int) -> Iterator[tuple[str, psutil.Process]]:
    model = folder / "model"
    write_checkpoint(model)
    serve = [sys.executable, "-m", "tests.agent_loop.extras.swarm.serve_process", "127.0.0.1:0"]
    trainer = [sys.executable, "-m", "benchmarks.swarm_memory", "--trainer", str(model)]
    argv = [*serve, str(folder), *trainer, "--batch", str(batch)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, encoding="utf-8") as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip(), psutil.Process(process.pid)
        finally:
            process.terminate()


async def _train(model: Path, batch: int) -> None:
    async with ScriptedEngine(lambda prompt: [*prompt[-3:], 257]) as engine:
        config = load_config(
            None,
            model=model,
            engines=[{"url": engine.url}],
            store=f"sqlite:///{model.parent}/proxy.db",
            admin_key=ADMIN_KEY,
            port=0,
        )
        async with listen(config) as served:
            hello = TrainerHello(
                proxy_url=served.url,
                proxy_admin_key=ADMIN_KEY,
                rollout=RolloutConfig(
                    groups_per_step=batch // GROUP, group_size=GROUP, max_tokens=4
                ),
                swarm=SwarmConfig(stop_rule="episodes", max_open=MAX_OPEN),
            )
            server = server_of_trainer()
            assert server is not None
            producer = SwarmProducer(*server, hello)
            for version in count():
                await producer.next_batch(version)


async def _measure(
    folder: Path, url: str, server: psutil.Process, arguments: argparse.Namespace
) -> None:
    token = client_token(url, folder, environment={})
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(AsyncSwarmClient(url, token))
            for _ in range(arguments.clients)
        ]
        await clients[0].auto_start("model: {path: m}")
        http = await stack.enter_async_context(aiohttp.ClientSession())
        print(f"| episodes | memory, MB ({arguments.metadata_bytes:,} bytes of metadata) |")
        print(f"|---|---|\n| 0 | {_mb(server):.1f} |", flush=True)
        numbers = iter(range(arguments.episodes))
        step = max(1, arguments.episodes // MEASUREMENTS)

        async def play(client: AsyncSwarmClient) -> None:
            for number in numbers:
                await _episode(client, http, f"t{number // GROUP}", arguments.metadata_bytes)
                if (number + 1) % step == 0:
                    print(f"| {number + 1:,} | {_mb(server):.1f} |", flush=True)

        await asyncio.gather(*(play(client) for client in clients))
        held = [await clients[0].begin_episode(task_id=f"h{n}") for n in range(MAX_OPEN)]
        before = _mb(server)
        claims = [
            asyncio.create_task(clients[0].begin_episode(task_id=f"w{n}"))
            for n in range(arguments.waiting)
        ]
        await _until_waiting(http, url, token, arguments.waiting)
        print(f"| {arguments.waiting:,} claims wait | {before:.1f}, then {_mb(server):.1f} |")
        for claim in claims:
            claim.cancel()
        await asyncio.gather(*claims, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            await asyncio.gather(*(clients[0].abort_episode(each) for each in held))


async def _episode(
    client: AsyncSwarmClient, http: aiohttp.ClientSession, task: str, metadata_bytes: int
) -> None:
    episode = await client.begin_episode(task_id=task)
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi."}]}
    headers = {"Authorization": f"Bearer {episode.api_key}"}
    async with http.post(
        f"{episode.base_url}/chat/completions", json=body, headers=headers
    ) as response:
        response.raise_for_status()
        await response.read()
    note = {"note": "x" * metadata_bytes} if metadata_bytes else {}
    await client.end_episode(episode, reward=1.0, metadata=note)


async def _until_waiting(http: aiohttp.ClientSession, url: str, token: str, number: int) -> None:
    headers = {"Authorization": f"Bearer {token}"}
    while True:
        async with http.get(f"{url}/metrics", headers=headers) as response:
            lines = (await response.text()).splitlines()
        if any(line.endswith(f" {float(number)}") and "waiting" in line for line in lines):
            return
        await asyncio.sleep(0.2)


def _mb(server: psutil.Process) -> float:
    return float(server.memory_info().rss) / 1e6


if __name__ == "__main__":
    main()
