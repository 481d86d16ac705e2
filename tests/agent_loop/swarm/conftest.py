"""A swarm server in this process, over a real proxy and a scripted engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp.test_utils import TestServer

from agent_loop.swarm import AsyncSwarmClient, Claimed, EngineState
from agent_loop.swarm.batching import SwarmSettings
from agent_loop.swarm.server import SwarmServer
from agent_loop.swarm.swarm import Swarm
from agent_loop.swarm.table import EpisodeTable
from agent_loop.swarm.wire import BatchView
from tests.proxy.conftest import (  # noqa: F401 (fixtures)
    ADMIN_KEY,
    RunningProxy,
    checkpoint,
    proxy,
    rendering,
    start_proxy,
)

TOKEN = "token-of-the-swarm"


class ScriptedTrainer:
    """The engine that clients start: says hello, and takes batches when it is told to."""

    def __init__(self, swarm: Swarm, url: str) -> None:
        self.swarm = swarm
        self.proxy_url = url
        self.server_url = ""
        self.key = ""
        self.version = 0
        self.at_start: BatchView | None = None
        self.run_dirs: list[str] = []
        """What each start was told to go on from."""

    async def start(self, run_dir: str) -> None:
        self.run_dirs.append(run_dir)
        self.swarm.set_state(EngineState.BOOTING)
        await self.post(
            "hello",
            {
                "proxy_url": self.proxy_url,
                "proxy_admin_key": ADMIN_KEY,
                "sampling": {"temperature": 1.0},
                "run_dir": "runs/scripted",
            },
        )
        self.at_start = await self.next_batch(wait_s=0)

    async def stop(self) -> None:
        await self.swarm.trainer_ended(EngineState.OFFLINE, "")

    async def next_batch(self, *, wait_s: float = 5.0) -> BatchView | None:
        if self.at_start is not None:
            batch, self.at_start = self.at_start, None
            return batch
        body = await self.post("next_batch", {"version": self.version, "wait_s": wait_s})
        if body is None:
            return None
        self.version += 1
        return BatchView.model_validate(body)

    async def post(self, route: str, body: Any) -> Any:
        headers = {"Authorization": f"Bearer {self.key}"}
        url = f"{self.server_url}/trainer/{route}"
        async with (
            aiohttp.ClientSession() as http,
            http.post(url, json=body, headers=headers) as response,
        ):
            assert response.status < 300, await response.text()
            return None if response.status == 204 else await response.json()


@dataclass(slots=True)
class RunningSwarm:
    url: str
    swarm: Swarm
    trainer: ScriptedTrainer
    client: AsyncSwarmClient
    http: aiohttp.ClientSession

    async def call(self, episode: Claimed, key: str | None = None) -> int:
        """One model call of an agent; the HTTP status."""
        body = {"model": "m", "messages": [{"role": "user", "content": "Hi."}]}
        headers = {"Authorization": f"Bearer {key or episode.api_key}"}
        url = f"{episode.base_url}/chat/completions"
        async with self.http.post(url, json=body, headers=headers) as response:
            await response.read()
            return response.status

    async def play(self, task_id: str, reward: float, **claim: Any) -> Claimed:
        """A whole episode."""
        episode = await self.client.begin_episode(task_id=task_id, timeout_s=5, **claim)
        assert await self.call(episode) == 200
        await self.client.end_episode(episode, reward=reward)
        return episode


StartSwarm = Callable[..., Awaitable[RunningSwarm]]


@pytest.fixture
async def start_swarm(proxy: RunningProxy, tmp_path: Path) -> AsyncIterator[StartSwarm]:  # noqa: F811
    """`start_swarm(**settings)`: rolling; again in the same test: the next server of that disk, or,
    with another `name`, of another."""
    async with AsyncExitStack() as stack:

        async def start(
            *, rolling: bool = True, name: str = "swarm", **settings: Any
        ) -> RunningSwarm:
            records = tmp_path / f"{name}-records"
            records.mkdir(exist_ok=True)
            table = EpisodeTable(tmp_path / f"{name}.sqlite")
            swarm = Swarm(SwarmSettings.model_validate(settings), table, records)
            trainer = ScriptedTrainer(swarm, proxy.url)
            server = SwarmServer(swarm, trainer, TOKEN, tmp_path / f"{name}.yaml")
            http_server = TestServer(server.build_app())
            await http_server.start_server()
            stack.push_async_callback(http_server.close)
            trainer.server_url = url = str(http_server.make_url("")).rstrip("/")
            trainer.key = server.trainer_key
            client = await stack.enter_async_context(AsyncSwarmClient(url, TOKEN, patience_s=1.0))
            http = await stack.enter_async_context(aiohttp.ClientSession())
            if rolling:
                await client.auto_start(yaml.safe_dump({"swarm": settings}))
            return RunningSwarm(url, swarm, trainer, client, http)

        yield start
