"""`AsyncJointClient`, `JointClient`: one agent with several models, each trained by its own swarm.

Its episodes, one on each server, are claimed, ended and aborted as one (`agent_loop/swarm/joint.py`
has the protocol). Invariant: all of them count or none does, also when this process is killed in
between; they are claimed in the order of their names, so that two agents never wait for each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

from agent_loop.swarm.client import AsyncSwarmClient, ending
from agent_loop.swarm.errors import SwarmError
from agent_loop.swarm.wire import Claimed, Decider, End, EpisodeView

T = TypeVar("T")
Episodes = Mapping[str, Claimed]
"""By the name of the model."""


class AsyncJointClient:
    """Example:
    joint = AsyncJointClient({"planner": AsyncSwarmClient(url_1), "coder": AsyncSwarmClient(url_2)})
    async with joint.episode(task_id="issue-7") as episodes:
        reward = await my_agent(episodes["planner"].base_url, episodes["coder"].base_url)
        await joint.end_episode(episodes, rewards={"planner": reward, "coder": reward})
    """

    def __init__(self, clients: Mapping[str, AsyncSwarmClient]) -> None:
        self.clients = {name: clients[name] for name in sorted(clients)}

    async def close(self) -> None:
        for client in self.clients.values():
            await client.close()

    async def begin_episode(self, **claim: Any) -> Episodes:
        """One on each server, or none. `claim`: as `AsyncSwarmClient.begin_episode`."""
        begun: dict[str, Claimed] = {}
        try:
            for name, client in self.clients.items():
                begun[name] = await client.begin_episode(**claim)
        except BaseException:
            await self.abort_episode(begun, "not all of its models could be had")
            raise
        return begun

    async def end_episode(
        self,
        episodes: Episodes,
        *,
        rewards: Mapping[str, float],
        task_id: str | None = None,
        turn_rewards: Mapping[str, Mapping[int, float]] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Mapping[str, EpisodeView]:
        """Decided, durably, when it returns: they count. Of a server that then could not be reached
        there is no view; it asks the deciding one by itself.

        Raises what `AsyncSwarmClient.end_episode` raises, after aborting all of them; but
        `unreachable` from the deciding server leaves it to the servers.
        """
        ends = {
            name: ending(
                episode,
                reward=rewards[name],
                task_id=task_id,
                turn_rewards=(turn_rewards or {}).get(name),
                metadata=metadata,
            )
            for name, episode in episodes.items()
        }
        first, *others = self.clients
        await self._prepare(episodes, ends, first)
        try:
            views = {first: await self.clients[first].commit_episode(episodes[first], ends[first])}
        except SwarmError as error:
            if not error.retryable:
                await self.abort_episode(episodes, f"{first}: {error.message}")
            raise
        for name in others:
            with contextlib.suppress(SwarmError):
                views[name] = await self.clients[name].commit_episode(episodes[name], ends[name])
        return views

    async def abort_episode(self, episodes: Episodes, reason: str = "") -> None:
        """Nothing of them is trained. A server that is away finds out by itself."""
        for name, episode in episodes.items():
            with contextlib.suppress(SwarmError):
                await self.clients[name].abort_episode(episode, reason)

    @asynccontextmanager
    async def episode(self, **claim: Any) -> AsyncIterator[Episodes]:
        """Aborted when the block leaves without having ended it."""
        episodes = await self.begin_episode(**claim)
        try:
            yield episodes
        finally:
            held = {n: e for n, e in episodes.items() if self.clients[n].holds(e)}
            await self.abort_episode(held, "its block was left without an end")

    async def _prepare(self, episodes: Episodes, ends: Mapping[str, End], first: str) -> None:
        decides = episodes[first]
        decider = Decider(
            url=self.clients[first].url, episode_id=decides.episode_id, key=decides.key
        )
        try:
            for name, episode in episodes.items():
                whom = None if name == first else decider
                await self.clients[name].prepare_episode(episode, ends[name], whom)
        except BaseException as error:
            await self.abort_episode(episodes, f"it could not be ended everywhere: {error}")
            raise


class JointClient:
    """`AsyncJointClient` for threads.

    Example: JointClient({"planner": url_1, "coder": url_2}, token)
    """

    def __init__(self, urls: Mapping[str, str], token: str | None = None, **settings: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._joint = AsyncJointClient(
            {name: AsyncSwarmClient(url, token, **settings) for name, url in urls.items()}
        )

    def close(self) -> None:
        self._run(self._joint.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def end_episode(
        self, episodes: Episodes, *, rewards: Mapping[str, float], **end: Any
    ) -> Mapping[str, EpisodeView]:
        return self._run(self._joint.end_episode(episodes, rewards=rewards, **end))

    @contextmanager
    def episode(self, **claim: Any) -> Iterator[Episodes]:
        """Aborted when the block leaves without having ended it."""
        manager = self._joint.episode(**claim)
        episodes = self._run(manager.__aenter__())
        try:
            yield episodes
        finally:
            self._run(manager.__aexit__(None, None, None))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
