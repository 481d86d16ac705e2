"""A swarm server in this process, with a real proxy and a scripted engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestServer

from agent_loop.extras.swarm import AsyncSwarmClient, Claimed, EngineState
from agent_loop.extras.swarm.server import SwarmServer
from agent_loop.extras.swarm.swarm import Swarm
from agent_loop.extras.swarm.table import EpisodeTable
from agent_loop.extras.swarm.wire import BatchView
from proxy.http.web_guard import Hosts
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
    """A trainer without a model: says hello, and takes batches when a test tells it to."""

    def __init__(self, swarm: Swarm, url: str) -> None:
        self.swarm = swarm
        self.proxy_url = url
        self.server_url = ""
        self.key = ""
        self.version = 0
        self.sections: dict[str, Any] = {}
        """The sections of the configuration that its hello reports."""
        self.at_start: BatchView | None = None
        self.run_dirs: list[str] = []
        """The run folder to resume, for each start."""

    async def start(self, run_dir: str) -> None:
        self.run_dirs.append(run_dir)
        await self.post(
            "hello",
            {
                "proxy_url": self.proxy_url,
                "proxy_admin_key": ADMIN_KEY,
                "run_dir": "runs/scripted",
                **self.sections,
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
    table: EpisodeTable
    trainer: ScriptedTrainer
    client: AsyncSwarmClient
    http: aiohttp.ClientSession

    async def call(self, episode: Claimed, key: str | None = None) -> int:
        """The HTTP status of one model call of an agent."""
        body = {"model": "m", "messages": [{"role": "user", "content": "Hi."}]}
        headers = {"Authorization": f"Bearer {key or episode.api_key}"}
        url = f"{episode.base_url}/chat/completions"
        async with self.http.post(url, json=body, headers=headers) as response:
            await response.read()
            return response.status

    async def play(self, task_id: str, reward: float, **claim: Any) -> Claimed:
        """Plays an episode from claim to end."""
        episode = await self.client.begin_episode(task_id=task_id, timeout_s=5, **claim)
        assert await self.call(episode) == 200
        await self.client.end_episode(episode, reward=reward)
        return episode

    def expire(self, episode: Claimed) -> None:
        """Its client sends no more heartbeats, and its lease runs out at once."""
        self.client.release(episode)
        one = self.swarm.episodes._open.get(episode.episode_id)
        if one is not None:
            one.lease_until = 0.0
            self.swarm.episodes.watch(one)
        self.swarm.set_state(self.swarm.state)  # a change: the swarm looks at its leases


StartSwarm = Callable[..., Awaitable[RunningSwarm]]


@pytest.fixture
async def start_swarm(proxy: RunningProxy, tmp_path: Path) -> AsyncIterator[StartSwarm]:  # noqa: F811
    """`start_swarm(groups=…, group_size=…, **swarm)` returns a swarm that is rolling. A second call
    starts the next server on the same disk or, with another `name`, on another disk."""
    async with AsyncExitStack() as stack:

        async def start(
            *,
            rolling: bool = True,
            name: str = "swarm",
            groups: int = 8,
            group_size: int = 8,
            **settings: Any,
        ) -> RunningSwarm:
            table = EpisodeTable(tmp_path / name)
            swarm = Swarm(table)
            trainer = ScriptedTrainer(swarm, proxy.url)
            trainer.sections = {
                "swarm": settings,
                "rollout": {"groups_per_step": groups, "group_size": group_size},
            }
            hosts = Hosts("127.0.0.1")
            server = SwarmServer(
                swarm, trainer, table, TOKEN, tmp_path / name / "trainer.yaml", hosts
            )
            http_server = TestServer(server.build_app())
            await http_server.start_server()
            stack.push_async_callback(http_server.close)
            trainer.server_url = url = str(http_server.make_url("")).rstrip("/")
            trainer.key = server.trainer_key
            client = await stack.enter_async_context(AsyncSwarmClient(url, TOKEN, patience_s=1.0))
            http = await stack.enter_async_context(aiohttp.ClientSession())
            if rolling:
                await client.auto_start("model: {path: m}")
            return RunningSwarm(url, swarm, table, trainer, client, http)

        yield start
