"""`AsyncJointClient`: one agent with several models, each of which its own swarm trains.

The agent's episodes, one on each server, are claimed, ended and aborted together;
`joint.py` has the protocol. Invariant: all of them count or none does, also when
this process is killed in between. Episodes are claimed in the order of the models' names, so that
two agents never wait for each other.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from agent_loop.extras.swarm.client import AsyncSwarmClient
from agent_loop.extras.swarm.client_texts import ending
from agent_loop.extras.swarm.errors import SwarmError
from agent_loop.extras.swarm.wire import Claimed, Decider, EpisodeEnd, EpisodeView

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
        """One episode on each server, or none. `claim`: as for `AsyncSwarmClient.begin_episode`."""
        begun: dict[str, Claimed] = {}
        try:
            for name, client in self.clients.items():
                begun[name] = await client.begin_episode(**claim)
        except BaseException:
            await self.abort_episode(begun, "not every model had an episode to give")
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
        """Ends all episodes; the decision that they count is on disk when this returns.

        A server that cannot be reached after the decision has no view in the result; it asks the
        deciding server by itself. Raises what `AsyncSwarmClient.end_episode` raises, after aborting
        all episodes; where the deciding server is `unreachable`, the servers decide on their own.
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
        for name in others:  # from now on, nothing here may abort what the first may have ended
            self.clients[name].release(episodes[name])
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
        """The episodes are never trained. A server that is away finds out by itself."""
        for name, episode in episodes.items():
            with contextlib.suppress(SwarmError):
                await self.clients[name].abort_episode(episode, reason)

    @asynccontextmanager
    async def episode(self, **claim: Any) -> AsyncIterator[Episodes]:
        """The episodes are aborted if the block does not end them."""
        episodes = await self.begin_episode(**claim)
        try:
            yield episodes
        finally:
            held = {n: e for n, e in episodes.items() if self.clients[n].holds(e)}
            await self.abort_episode(held, "its block did not end it")

    async def _prepare(
        self, episodes: Episodes, ends: Mapping[str, EpisodeEnd], first: str
    ) -> None:
        decides = episodes[first]
        decider = Decider(
            url=self.clients[first].url, episode_id=decides.episode_id, key=decides.key
        )
        try:
            for name, episode in episodes.items():
                whom = None if name == first else decider
                await self.clients[name].prepare_episode(episode, ends[name], whom)
        except BaseException as error:
            await self.abort_episode(episodes, f"not every server could end it: {error}")
            raise
