"""Episodes of two swarms that count together or not at all, whichever process is killed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from agent_loop.extras.swarm import AsyncJointClient, Claimed, EpisodeState, JointClient, SwarmError
from agent_loop.extras.swarm.client import AsyncSwarmClient
from agent_loop.extras.swarm.client_texts import ending
from agent_loop.extras.swarm.joint_client import Episodes
from agent_loop.extras.swarm.wire import Decider
from tests.agent_loop.extras.swarm.conftest import TOKEN, RunningSwarm, StartSwarm

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
        """The client sends no more heartbeats, so that its leases run out: first on `a`, then on
        `b`."""
        for name, episode in episodes.items():
            swarm = self.swarms[name]
            swarm.expire(episode)
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


async def test_client_for_threads_ends_both_episodes(start_swarm: StartSwarm) -> None:
    """The lines of docs/swarm.md."""
    one, two = [await start_swarm(name=name, groups=4) for name in ("planner", "coder")]
    joint = JointClient({"planner": one.url, "coder": two.url}, TOKEN)

    main = asyncio.get_running_loop()

    def my_agent(planner: Claimed, coder: Claimed) -> float:
        for swarm, episode in ((one, planner), (two, coder)):
            called = asyncio.run_coroutine_threadsafe(swarm.call(episode), main)
            assert called.result(60) == 200
        return 1.0

    def work() -> None:
        with joint.episode(task_id="issue-7") as episodes:
            reward = my_agent(episodes["planner"], episodes["coder"])
            joint.end_episode(episodes, rewards={"planner": reward, "coder": reward})
        joint.close()

    await asyncio.to_thread(work)
    for swarm in (one, two):
        assert (await swarm.client.status()).counts["ended"] == 1


async def test_both_episodes_count_with_their_own_rewards(pair: Pair) -> None:
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


async def test_both_episodes_are_aborted_if_their_block_does_not_end_them(pair: Pair) -> None:
    with pytest.raises(RuntimeError):
        async with pair.joint.episode(timeout_s=5):
            raise RuntimeError
    assert await pair.counts() == [{"aborted": 1}, {"aborted": 1}]


@pytest.mark.parametrize("gone", ["a", "b"])
async def test_if_one_episode_was_reclaimed_the_other_does_not_count(pair: Pair, gone: str) -> None:
    episodes = await pair.begin()
    await pair.swarms[gone].swarm.episodes.abandon("reclaimed")
    with pytest.raises(SwarmError) as caught:
        await pair.joint.end_episode(episodes, rewards=REWARDS)
    assert caught.value.code == "late"
    assert await pair.counts() == [{"aborted": 1}, {"aborted": 1}]


async def test_if_one_model_has_no_episode_the_other_claim_is_aborted(pair: Pair) -> None:
    await pair.swarms["b"].client.stop_engine()
    with pytest.raises(SwarmError, match="offline"):
        await pair.joint.begin_episode(timeout_s=1)
    assert await pair.counts() == [{"aborted": 1}, {}]


async def test_neither_episode_counts_if_the_client_is_killed_before_the_decision(
    pair: Pair,
) -> None:
    episodes = await pair.begin()
    await pair.prepare(episodes, "a", "b")
    assert await pair.counts() == [{"prepared": 1}, {"prepared": 1}]
    await pair.is_killed(episodes)
    assert await pair.counts() == [{"expired": 1}, {"aborted": 1}]
    assert not list(pair.swarms["b"].table.records.iterdir())


async def test_both_episodes_count_if_the_client_is_killed_after_the_decision(pair: Pair) -> None:
    episodes = await pair.begin()
    await pair.prepare(episodes, "a", "b")
    await pair.swarms["a"].client.commit_episode(
        episodes["a"], ending(episodes["a"], reward=REWARDS["a"])
    )
    await pair.is_killed(episodes)
    assert await _state(pair.swarms["b"], episodes["b"]) is EpisodeState.ENDED
    assert [e.view.reward for e in pair.swarms["b"].swarm.episodes.collected] == [0.5]


async def test_restarted_server_asks_for_the_decision_about_its_prepared_episode(
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


async def test_prepared_episode_does_not_count_and_ends_only_as_prepared(pair: Pair) -> None:
    episodes = await pair.begin()
    await pair.prepare(episodes, "a")
    assert len(pair.swarms["a"].swarm.episodes.collected) == 0
    with pytest.raises(SwarmError) as caught:
        await pair.swarms["a"].client.end_episode(episodes["a"], reward=0.0)
    assert caught.value.code == "conflict"
    await pair.joint.abort_episode(episodes)
    assert await pair.counts() == [{"aborted": 1}, {"aborted": 1}]


async def test_prepared_episodes_survive_the_end_of_their_trainer(pair: Pair) -> None:
    episodes = await pair.begin()
    await pair.prepare(episodes, "a", "b")
    await pair.swarms["b"].client.stop_engine()
    views = await pair.joint.end_episode(episodes, rewards=REWARDS)
    assert [view.state.value for view in views.values()] == ["ended", "ended"]


async def test_outcome_needs_the_episodes_key(pair: Pair) -> None:
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


@pytest.mark.parametrize("lost", [SwarmError("no answer", "unreachable"), asyncio.CancelledError()])
async def test_lost_answer_of_the_deciding_server_aborts_no_other_episode(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, lost: BaseException
) -> None:
    """The episode on `a` counts, although its client does not know it."""
    call = AsyncSwarmClient._call

    async def call_without_answer(
        client: AsyncSwarmClient, method: str, path: str, *b: Any, **n: Any
    ) -> Any:
        answer = await call(client, method, path, *b, **n)
        if client is pair.swarms["a"].client and path.endswith("/end"):
            raise lost
        return answer

    async def play() -> None:
        async with pair.joint.episode(task_id="one", timeout_s=5) as begun:
            episodes.update(begun)
            for name, episode in begun.items():
                assert await pair.swarms[name].call(episode) == 200
            await pair.joint.end_episode(begun, rewards=REWARDS)

    episodes: dict[str, Claimed] = {}
    monkeypatch.setattr(AsyncSwarmClient, "_call", call_without_answer)
    with pytest.raises(type(lost)):
        await play()
    await pair.is_killed(episodes)
    assert await pair.counts() == [{"ended": 1}, {"ended": 1}]
