"""Episodes of two swarms that count together or not at all, whoever is killed in between."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from agent_loop.swarm import AsyncJointClient, Claimed, EpisodeState, SwarmError
from agent_loop.swarm.client import ending
from agent_loop.swarm.joint_client import Episodes
from agent_loop.swarm.wire import Decider
from tests.agent_loop.swarm.conftest import RunningSwarm, StartSwarm

REWARDS = {"a": 1.0, "b": 0.5}


@dataclass(slots=True)
class Pair:
    swarms: dict[str, RunningSwarm]
    joint: AsyncJointClient

    async def begin(self) -> Episodes:
        """Episodes whose agent has called both models."""
        episodes = await self.joint.begin_episode(task_id="one", timeout_s=5)
        for name, episode in episodes.items():
            assert await self.swarms[name].call(episode) == 200
        return episodes

    async def counts(self) -> list[dict[str, int]]:
        return [(await swarm.client.status()).counts for swarm in self.swarms.values()]

    async def prepare(self, episodes: Episodes, *names: str) -> None:
        decider = Decider(
            url=self.swarms["a"].url,
            episode_id=episodes["a"].episode_id,
            key=episodes["a"].key,
        )
        for name in names:
            end = ending(episodes[name], reward=REWARDS[name])
            whom = None if name == "a" else decider
            view = await self.swarms[name].client.prepare_episode(episodes[name], end, whom)
            assert view.state is EpisodeState.PREPARED

    async def is_killed(self, episodes: Episodes) -> None:
        """No more heartbeats, and so the leases run out: first on `a`, then on `b`."""
        for name, episode in episodes.items():
            swarm = self.swarms[name]
            swarm.client._release(episode)
            if one := swarm.swarm.episodes._open.get(episode.episode_id):
                one.lease_until = 0.0
            swarm.swarm.set_state(swarm.swarm.state)  # a change: it looks at its leases
            await _until_not(swarm, episode, EpisodeState.PREPARED)


@pytest.fixture
async def pair(start_swarm: StartSwarm) -> Pair:
    swarms = {name: await start_swarm(name=name, groups=4) for name in ("a", "b")}
    return Pair(swarms, AsyncJointClient({name: swarm.client for name, swarm in swarms.items()}))


async def _until_not(swarm: RunningSwarm, episode: Claimed, state: EpisodeState) -> None:
    async with asyncio.timeout(60):
        async for _ in swarm.client.changes():
            if await _state(swarm, episode) is not state:
                return


async def _state(swarm: RunningSwarm, episode: Claimed) -> EpisodeState:
    return await swarm.swarm.episodes.outcome(episode.episode_id, episode.key)


async def test_both_count_with_their_own_rewards(pair: Pair) -> None:
    async with pair.joint.episode(task_id="one", timeout_s=5) as episodes:
        for name, episode in episodes.items():
            assert await pair.swarms[name].call(episode) == 200
        views = await pair.joint.end_episode(
            episodes, rewards=REWARDS, turn_rewards={"b": {0: 0.25}}
        )
    assert {name: (view.state.value, view.reward) for name, view in views.items()} == {
        "a": ("ended", 1.0),
        "b": ("ended", 0.5),
    }
    assert views["b"].turn_rewards == {0: 0.25}
    assert await pair.counts() == [{"ended": 1}, {"ended": 1}]


async def test_left_without_an_end_both_are_aborted(pair: Pair) -> None:
    with pytest.raises(RuntimeError):
        async with pair.joint.episode(timeout_s=5):
            raise RuntimeError
    assert await pair.counts() == [{"aborted": 1}, {"aborted": 1}]


@pytest.mark.parametrize("gone", ["a", "b"])
async def test_where_one_was_reclaimed_the_other_does_not_count(pair: Pair, gone: str) -> None:
    episodes = await pair.begin()
    await pair.swarms[gone].swarm.episodes.abandon("reclaimed")
    with pytest.raises(SwarmError) as caught:
        await pair.joint.end_episode(episodes, rewards=REWARDS)
    assert caught.value.code == "late"
    assert await pair.counts() == [{"aborted": 1}, {"aborted": 1}]


async def test_a_model_that_cannot_be_had_gives_the_other_back(pair: Pair) -> None:
    await pair.swarms["b"].client.stop_engine()
    with pytest.raises(SwarmError, match="offline"):
        await pair.joint.begin_episode(timeout_s=1)
    assert await pair.counts() == [{"aborted": 1}, {}]


async def test_killed_before_the_decision_neither_counts(pair: Pair) -> None:
    episodes = await pair.begin()
    await pair.prepare(episodes, "a", "b")
    assert await pair.counts() == [{"prepared": 1}, {"prepared": 1}]
    await pair.is_killed(episodes)
    assert await pair.counts() == [{"expired": 1}, {"aborted": 1}]
    assert not list(pair.swarms["b"].swarm.episodes._records.iterdir())


async def test_killed_after_the_decision_both_count(pair: Pair) -> None:
    episodes = await pair.begin()
    await pair.prepare(episodes, "a", "b")
    await pair.swarms["a"].client.commit_episode(
        episodes["a"], ending(episodes["a"], reward=REWARDS["a"])
    )
    await pair.is_killed(episodes)
    assert await _state(pair.swarms["b"], episodes["b"]) is EpisodeState.ENDED
    assert [view.reward for view in pair.swarms["b"].swarm.episodes.ended] == [0.5]


async def test_a_server_that_restarts_in_doubt_asks_what_was_decided(
    pair: Pair, start_swarm: StartSwarm
) -> None:
    episodes = await pair.begin()
    await pair.prepare(episodes, "a", "b")
    await pair.swarms["a"].client.commit_episode(
        episodes["a"], ending(episodes["a"], reward=REWARDS["a"])
    )
    pair.swarms["b"] = await start_swarm(name="b", groups=4, rolling=False)
    assert await _state(pair.swarms["b"], episodes["b"]) is EpisodeState.PREPARED
    await pair.is_killed({"b": episodes["b"]})
    assert await _state(pair.swarms["b"], episodes["b"]) is EpisodeState.ENDED


async def test_prepared_is_no_end_and_can_only_be_ended_so(pair: Pair) -> None:
    episodes = await pair.begin()
    await pair.prepare(episodes, "a")
    assert pair.swarms["a"].swarm.episodes.ended == []
    with pytest.raises(SwarmError) as caught:
        await pair.swarms["a"].client.end_episode(episodes["a"], reward=0.0)
    assert caught.value.code == "conflict"
    await pair.joint.abort_episode(episodes)
    assert await pair.counts() == [{"aborted": 1}, {"aborted": 1}]


async def test_its_trainers_end_does_not_undo_what_is_prepared(pair: Pair) -> None:
    episodes = await pair.begin()
    await pair.prepare(episodes, "a", "b")
    await pair.swarms["b"].client.stop_engine()
    views = await pair.joint.end_episode(episodes, rewards=REWARDS)
    assert [view.state.value for view in views.values()] == ["ended", "ended"]


async def test_the_outcome_is_told_for_the_episodes_key_only(pair: Pair) -> None:
    episodes = await pair.begin()
    swarm, episode = pair.swarms["a"], episodes["a"]
    url = f"{swarm.url}/v1/episodes/{episode.episode_id}/outcome"
    statuses = []
    for key in ("", episodes["b"].key, episode.key):
        async with swarm.http.get(url, headers={"X-Episode-Key": key}) as response:
            statuses.append(response.status)
            body = await response.json()
    assert statuses == [403, 403, 200]
    assert body == {"state": "claimed"}
