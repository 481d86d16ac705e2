"""Server, trainer and clients as processes, each killed with SIGKILL in turn."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest

from agent_loop.extras.swarm import AsyncSwarmClient, Claimed, EngineState, Status
from agent_loop.extras.swarm.token import TOKEN_VARIABLE, client_token
from tests.proxy.conftest import checkpoint  # noqa: F401 (a fixture)

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[4]
CLIENT = """
import sys, time
from agent_loop.extras.swarm import SwarmClient
swarm = SwarmClient(sys.argv[1])
episode = swarm.begin_episode(task_id="gone", lease_s=1.0, timeout_s=20)
print(episode.episode_id, flush=True)
time.sleep(1000)
"""
CONFIG = "model: {path: m}"


@contextmanager
def swarm_server(folder: Path, model: Path, port: int = 0) -> Iterator[tuple[str, int]]:
    """A running server: its URL and process id."""
    trainer = [sys.executable, "-m", "tests.agent_loop.extras.swarm.scripted_trainer", str(model)]
    serve = "tests.agent_loop.extras.swarm.serve_process"
    command = [sys.executable, "-m", serve, f"127.0.0.1:{port}", str(folder)]
    with (folder / "server.log").open("ab") as log:
        process = subprocess.Popen(
            [*command, *trainer, str(folder / "batches.jsonl")],
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=ROOT,
        )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().decode().strip(), process.pid
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def client_of(folder: Path, url: str) -> AsyncSwarmClient:
    """A client with the token that the server has made."""
    return AsyncSwarmClient(url, client_token(url, folder, environment={}))


async def play(swarm: AsyncSwarmClient, task: str, reward: float) -> Claimed:
    episode = await swarm.begin_episode(task_id=task, timeout_s=20)
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi."}]}
    headers = {"Authorization": f"Bearer {episode.api_key}"}
    url = f"{episode.base_url}/chat/completions"
    async with (
        aiohttp.ClientSession() as http,
        http.post(url, json=body, headers=headers) as answer,
    ):
        assert answer.status == 200, await answer.text()
    await swarm.end_episode(episode, reward=reward)
    return episode


async def until(swarm: AsyncSwarmClient, state: EngineState) -> Status:
    async with asyncio.timeout(30):
        async for status in swarm.changes():
            if status.state is state:
                return status
    raise AssertionError


def batches(folder: Path) -> list[dict[str, object]]:
    path = folder / "batches.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def test_episode_of_a_killed_client_is_reclaimed_after_its_lease(
    tmp_path: Path,
    checkpoint: Path,  # noqa: F811
) -> None:
    with swarm_server(tmp_path, checkpoint) as (url, _):
        async with client_of(tmp_path, url) as swarm:
            await swarm.auto_start(CONFIG)
            client = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", CLIENT, url),
                stdout=asyncio.subprocess.PIPE,
                cwd=ROOT,
                env={**os.environ, TOKEN_VARIABLE: str(swarm.token)},
            )
            assert client.stdout is not None
            episode_id = (await client.stdout.readline()).decode().strip()
            client.kill()
            killed_at = time.time()
            await client.wait()
            async with asyncio.timeout(30):
                async for status in swarm.changes():
                    if status.counts.get("expired"):
                        break
            reclaimed = time.time() - killed_at
            buffer = await swarm.get_episode_buffer()
    assert episode_id.startswith("e-")
    assert episode_id not in {episode.episode_id for episode in buffer}
    assert reclaimed < 1.0 + 1.0 + 5.0  # the lease, one second, and a margin for a busy machine


async def test_killed_trainer_is_an_error_and_the_next_one_trains_the_ended_episodes(
    tmp_path: Path,
    checkpoint: Path,  # noqa: F811
) -> None:
    with swarm_server(tmp_path, checkpoint) as (url, _):
        async with client_of(tmp_path, url) as swarm:
            await swarm.auto_start(CONFIG)
            await play(swarm, "a", 1.0)
            await play(swarm, "a", 0.0)
            await until_batches(tmp_path, 1)
            kept = await play(swarm, "b", 1.0)
            os.kill(int(str(batches(tmp_path)[0]["pid"])), signal.SIGKILL)
            status = await until(swarm, EngineState.ERROR)
            assert "exit code" in status.detail
            await swarm.start_engine()
            await play(swarm, "b", 0.0)
            await until_batches(tmp_path, 2)
    assert kept.episode_id in str(batches(tmp_path)[1]["episodes"])


async def test_killed_server_loses_no_acknowledged_end_and_leaves_no_trainer(
    tmp_path: Path,
    checkpoint: Path,  # noqa: F811
) -> None:
    with swarm_server(tmp_path, checkpoint) as (url, pid):
        async with client_of(tmp_path, url) as swarm:
            await swarm.auto_start(CONFIG)
            await play(swarm, "a", 1.0)
            await play(swarm, "a", 0.0)
            await until_batches(tmp_path, 1)
            trainer = int(str(batches(tmp_path)[0]["pid"]))
            kept = await play(swarm, "b", 1.0)
            os.kill(pid, signal.SIGKILL)
    with swarm_server(tmp_path, checkpoint) as (url, _):
        async with client_of(tmp_path, url) as swarm:
            status = await swarm.status()
            assert (status.state, status.collected) == (EngineState.INTERRUPTED, 1)
            await swarm.start_engine()
            await play(swarm, "b", 0.0)
            await until_batches(tmp_path, 2)
    assert kept.episode_id in str(batches(tmp_path)[1]["episodes"])
    assert batches(tmp_path)[1]["pid"] != trainer
    assert not Path(f"/proc/{trainer}").exists()


async def until_batches(folder: Path, count: int) -> None:
    async with asyncio.timeout(30):
        while len(batches(folder)) < count:  # noqa: ASYNC110 (another process's file)
            await asyncio.sleep(0.02)
