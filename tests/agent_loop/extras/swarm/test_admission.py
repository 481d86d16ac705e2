"""Which claims are served, in which order, and at which cost."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any

import pytest

from agent_loop.extras.swarm import admission
from agent_loop.extras.swarm.admission import Admission, Blocked
from agent_loop.extras.swarm.batching import Collected
from agent_loop.extras.swarm.config import BatchPlan
from agent_loop.extras.swarm.episode import Episode
from agent_loop.extras.swarm.errors import SwarmError
from agent_loop.extras.swarm.wire import Claim, EpisodeState, EpisodeView
from tests.agent_loop.extras.swarm.test_batching import plan_of


class CountingAdmission(Admission):
    """Counts how often a claim is looked at."""

    looks = 0

    def blocked(self, claim: Claim) -> Blocked | None:
        self.looks += 1
        return super().blocked(claim)


class Places:
    """An admission with an open engine, and the episodes that it gave out."""

    def __init__(self, plan: BatchPlan) -> None:
        self.collected = Collected(plan)
        self.numbers = count()
        self.admission = CountingAdmission(self.collected, self._make, self._take_back)
        self.admission.open_engine()

    def _make(self, claim: Claim) -> Episode:
        view = EpisodeView(
            episode_id=f"e{next(self.numbers)}",
            client_id=claim.client_id,
            kind=claim.kind,
            state=EpisodeState.CLAIMED,
            task_id=claim.task_id,
            source=claim.source,
        )
        return Episode(view, b"")

    def _take_back(self, episode: Episode) -> None:
        self.admission.discard(episode.view)

    async def enter(self, client: str, *, wait_s: float = 0.0, **claim: Any) -> Episode:
        wanted = Claim(client_id=client, wait_s=wait_s, **claim)
        return await self.admission.enter(wanted, lambda reason: SwarmError(reason, "throttled"))

    def move(self, episode: Episode, state: EpisodeState, **changes: Any) -> None:
        before, episode.view = episode.view, episode.moved(state, **changes)
        if before.state is EpisodeState.ENDED:
            self.collected.remove([episode])
        if state is EpisodeState.ENDED:
            self.collected.add(episode)
        self.admission.moved(before, episode.view)
        self.admission.look_at_freed([before])


async def waiting(places: Places, number: int) -> None:
    """Returns when this many claims wait."""
    async with asyncio.timeout(5):
        while places.admission.waiting != number:  # noqa: ASYNC110 (the tasks have only to run)
            await asyncio.sleep(0)


async def test_task_and_a_source_get_no_more_than_their_share() -> None:
    places = Places(plan_of(groups=2, group_size=2, mix={"easy": 3, "hard": 1}, max_open=4))
    await places.enter("c", task_id="a", source="hard")
    for source, share in (("hard", 1), ("other", 0)):
        with pytest.raises(SwarmError, match=f"its share of a batch is {share}"):
            await places.enter("c", task_id="b", source=source)
    await places.enter("c", task_id="a", source="easy")
    with pytest.raises(SwarmError, match=r"rollout\.group_size is 2"):
        await places.enter("c", task_id="a", source="easy")
    await places.enter("c", task_id="b", source="easy")
    await places.enter("c", kind="eval")
    with pytest.raises(SwarmError, match=r"swarm\.max_open is 4"):
        await places.enter("c", task_id="c", source="easy")


async def test_ended_episodes_are_bounded() -> None:
    places = Places(plan_of(max_collected=2))
    for task in ("a", "b"):
        places.move(await places.enter("c", task_id=task), EpisodeState.ENDED, reward=1.0)
    with pytest.raises(SwarmError, match=r"swarm\.max_collected is 2"):
        await places.enter("c", task_id="c")


async def test_freed_place_goes_to_the_claim_that_waited_longest() -> None:
    places = Places(plan_of(max_open=1))
    first = await places.enter("first")
    claims = []
    for number, name in enumerate(("second", "third"), start=1):
        claims.append(asyncio.create_task(places.enter(name, wait_s=5)))
        await waiting(places, number)
    places.move(first, EpisodeState.ABORTED)
    second = await claims[0]
    assert second.view.client_id == "second"
    assert not claims[1].done()
    places.move(second, EpisodeState.EXPIRED)
    assert (await claims[1]).view.client_id == "third"


async def test_claim_cancelled_as_it_is_served_gives_its_place_to_the_next() -> None:
    places = Places(plan_of(max_open=1))
    first = await places.enter("first")
    gone = asyncio.create_task(places.enter("gone", wait_s=5))
    await waiting(places, 1)
    following = asyncio.create_task(places.enter("following", wait_s=5))
    await waiting(places, 2)
    places.move(first, EpisodeState.ABORTED)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert (await following).view.client_id == "following"


async def test_every_waiting_claim_is_refused_when_the_engine_ends() -> None:
    places = Places(plan_of(max_open=1))
    await places.enter("first")
    claims = [asyncio.create_task(places.enter(str(n), wait_s=60)) for n in range(3)]
    await waiting(places, 3)
    places.admission.refuse_all(SwarmError("the engine is offline", "state"))
    ended = await asyncio.gather(*claims, return_exceptions=True)
    assert [str(error) for error in ended] == ["the engine is offline"] * 3


async def _one_change(places: Places) -> int:
    """The number of claims that are looked at after an abort and an end, each of which frees a
    place that no claim waits for."""
    aborted = await places.enter("c", task_id="abort")
    finished = await places.enter("c", task_id="end")
    before = places.admission.looks
    places.move(aborted, EpisodeState.ABORTED)
    places.move(finished, EpisodeState.ENDED, reward=1.0)
    return places.admission.looks - before


@pytest.mark.parametrize("open_episodes", [10, 10_000])
async def test_change_costs_the_same_with_ten_and_with_ten_thousand_open_episodes(
    open_episodes: int,
) -> None:
    places = Places(plan_of(groups=5000, group_size=2, max_open=50_000))
    for number in range(open_episodes):
        await places.enter("c", task_id=f"t{number // 2}")
    claims = [
        asyncio.create_task(places.enter(str(n), task_id="t0", wait_s=60)) for n in range(200)
    ]
    await waiting(places, 200)

    assert await _one_change(places) == 0

    for claim in claims:
        claim.cancel()
    await asyncio.gather(*claims, return_exceptions=True)
    assert places.admission.waiting == 0


@pytest.mark.parametrize("number", [10, 1000])
async def test_freed_place_costs_two_looks_at_claims_however_many_wait(number: int) -> None:
    places = Places(plan_of(max_open=1))
    first = await places.enter("first")
    claims = [asyncio.create_task(places.enter(str(n), wait_s=60)) for n in range(number)]
    await waiting(places, number)
    before = places.admission.looks

    places.move(first, EpisodeState.ABORTED)
    await claims[0]

    assert places.admission.looks - before == 2
    assert places.admission.waiting == number - 1
    for claim in claims[1:]:
        claim.cancel()
    await asyncio.gather(*claims[1:], return_exceptions=True)


async def test_number_of_waiting_claims_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_WAITING", 3)
    places = Places(plan_of(max_open=1))
    await places.enter("first")
    claims = [asyncio.create_task(places.enter(str(n), wait_s=60)) for n in range(3)]
    await waiting(places, 3)
    with pytest.raises(SwarmError, match=r"swarm\.max_open is 1, and 3 claims wait already"):
        await places.enter("one too many", wait_s=60)
    for claim in claims:
        claim.cancel()
    await asyncio.gather(*claims, return_exceptions=True)
