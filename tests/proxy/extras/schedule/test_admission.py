"""Calls that wait for the schedule, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from proxy.extras.schedule.admission import CacheAdmission
from proxy.extras.schedule.section import SchedulingConfig
from proxy.routing.cache_room import RoomClaim
from tests.agent_loop.virtual_time import run_in_virtual_time

MAX_WAIT_S = 50.0


class Waits:
    """An admission with one replica of 1000 tokens, and what its calls waited."""

    def __init__(self) -> None:
        self.admission = CacheAdmission(
            SchedulingConfig(max_wait_s=MAX_WAIT_S, cache_share=1.0),
            on_admitted=lambda waited_s, overdue: self.waited.append((waited_s, overdue)),
        )
        self.waited: list[tuple[float, bool]] = []
        self.usable = ["gpu"]
        self.admission.report("gpu", 1000)

    async def arrive(self, call_id: str, tokens: int, **more: Any) -> str | None:
        claim = RoomClaim(call_id, call_id.partition("#")[0], tokens, max_tokens=0, **more)
        return await self.admission.admitted(claim, lambda: self.usable)


def in_virtual_time(main: Coroutine[Any, Any, None]) -> None:
    run_in_virtual_time(main)


@pytest.mark.parametrize(("allowed_s", "waited_s"), [(None, MAX_WAIT_S), (7.0, 7.0), (0.0, 0.0)])
def test_call_waits_no_longer_than_it_may(allowed_s: float | None, waited_s: float) -> None:
    waits = Waits()

    async def main() -> None:
        await waits.arrive("a#0", 900)
        assert await waits.arrive("b#0", 900, max_wait_s=allowed_s) == "gpu"

    in_virtual_time(main())
    assert waits.waited == [(0.0, False), (waited_s, True)]


def test_paused_call_goes_when_a_session_has_been_away_for_long() -> None:
    waits = Waits()

    async def main() -> None:
        await waits.arrive("a#0", 800)
        waits.admission.ended("a", "a#0", 800, 0)
        await waits.arrive("b#0", 400)

    in_virtual_time(main())
    ((_, _), (waited_s, overdue)) = waits.waited
    assert not overdue
    assert waited_s == pytest.approx(waits.admission.schedule.away.usual_s, abs=0.1)


def test_call_that_hangs_up_while_it_is_paused_leaves_nothing_and_loses_no_other_call() -> None:
    waits = Waits()

    async def main() -> None:
        await waits.arrive("a#0", 900)
        gone = asyncio.create_task(waits.arrive("b#0", 800))
        stays = asyncio.create_task(waits.arrive("c#0", 700))
        await asyncio.sleep(0)  # both tasks run until they wait
        assert waits.admission.schedule.waiting == 2
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        assert waits.admission.schedule.waiting == 1
        waits.admission.forget("a")
        waits.admission.ended("a", "a#0", 900, 0)
        assert await stays == "gpu"

    in_virtual_time(main())


def test_call_that_hangs_up_in_the_moment_of_its_grant_gives_its_room_to_the_next() -> None:
    waits = Waits()

    async def main() -> None:
        await waits.arrive("a#0", 900)
        gone = asyncio.create_task(waits.arrive("b#0", 800))
        next_one = asyncio.create_task(waits.arrive("c#0", 700))
        await asyncio.sleep(0)  # both tasks run until they wait
        assert waits.admission.schedule.waiting == 2
        waits.admission.forget("a")
        waits.admission.ended("a", "a#0", 900, 0)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        waits.admission.forget("b")
        assert await next_one == "gpu"

    in_virtual_time(main())


SAME_MOMENT_S = 1e-10
"""Two timers that are this close to each other run in one iteration of the loop, in this order."""


@pytest.mark.parametrize("granted_after_s", [-SAME_MOMENT_S, SAME_MOMENT_S])
@pytest.mark.parametrize("hangs_up", [False, True])
def test_grant_at_the_moment_when_the_wait_ends_counts_once(
    granted_after_s: float, hangs_up: bool
) -> None:
    waits = Waits()
    schedule = waits.admission.schedule

    async def main() -> None:
        loop = asyncio.get_running_loop()
        await waits.arrive("a#0", 500)
        await waits.arrive("c#0", 100)  # stays, so that the ledger is never empty
        paused = asyncio.create_task(waits.arrive("b#0", 600))

        def end_the_other() -> None:
            waits.admission.ended("a", "a#0", 500, 0)
            waits.admission.forget("a")
            if hangs_up:
                paused.cancel()

        loop.call_at(loop.time() + MAX_WAIT_S + granted_after_s, end_the_other)
        if hangs_up:
            with pytest.raises(asyncio.CancelledError):
                await paused
        else:
            assert await paused == "gpu"
            waits.admission.ended("b", "b#0", 600, 0)
        waits.admission.forget("b")

    in_virtual_time(main())
    assert (schedule.waiting, schedule.seated) == (0, 1)
    if not hangs_up:
        ((waited_s, seated),) = waits.waited[2:]
        assert waited_s == pytest.approx(MAX_WAIT_S)
        assert not seated


def test_paused_calls_look_for_another_replica_when_theirs_is_lost() -> None:
    waits = Waits()

    async def main() -> None:
        await waits.arrive("a#0", 900)
        paused = asyncio.create_task(waits.arrive("b#0", 800))
        await asyncio.sleep(0)  # the task runs until it waits
        assert waits.admission.schedule.waiting == 1
        waits.admission.report("other", 1000)
        waits.usable = ["other"]
        waits.admission.lost("gpu")
        assert await paused == "other"

    in_virtual_time(main())


def test_calls_pass_without_a_schedule_if_no_replica_is_left() -> None:
    waits = Waits()

    async def main() -> None:
        await waits.arrive("a#0", 900)
        paused = asyncio.create_task(waits.arrive("b#0", 800))
        await asyncio.sleep(0)  # the task runs until it waits
        assert waits.admission.schedule.waiting == 1
        waits.usable = []
        waits.admission.lost("gpu")
        assert await paused is None

    in_virtual_time(main())


def test_failed_call_of_the_only_replica_releases_no_call() -> None:
    waits = Waits()
    schedule = waits.admission.schedule

    async def main() -> None:
        await waits.arrive("a#0", 900)
        paused = [asyncio.create_task(waits.arrive(f"b{n}#0", 600)) for n in range(3)]
        await asyncio.sleep(1)
        waits.admission.failed("gpu")
        paused.append(asyncio.create_task(waits.arrive("new#0", 50)))
        await asyncio.sleep(1)
        assert (schedule.waiting, schedule.seated) == (4, 1)
        waits.admission.report("gpu", 1000)
        await asyncio.sleep(1)
        assert (schedule.waiting, schedule.seated) == (4, 1)
        assert not any(task.done() for task in paused)
        waits.admission.ended("a", "a#0", 900, 0)
        waits.admission.forget("a")
        await asyncio.sleep(1)
        assert [task.done() for task in paused] == [True, False, False, True]
        assert await asyncio.gather(*paused) == ["gpu"] * 4

    in_virtual_time(main())
    assert max(waited_s for waited_s, _ in waits.waited) == MAX_WAIT_S


def test_call_waits_for_a_replica_that_stays_down_no_longer_than_it_may() -> None:
    waits = Waits()

    async def main() -> None:
        waits.admission.failed("gpu")
        assert await waits.arrive("a#0", 10) == "gpu"

    in_virtual_time(main())
    assert waits.waited == [(MAX_WAIT_S, True)]


@pytest.mark.parametrize(("cache_tokens", "replica"), [(1000, "other"), (None, None)])
def test_calls_that_wait_for_a_failed_replica_go_to_one_that_joins(
    cache_tokens: int | None, replica: str | None
) -> None:
    waits = Waits()

    async def main() -> None:
        waits.admission.failed("gpu")
        paused = asyncio.create_task(waits.arrive("a#0", 10))
        await asyncio.sleep(1)
        assert waits.admission.schedule.waiting == 1
        waits.usable = ["other"]
        waits.admission.report("other", cache_tokens)
        assert await paused == replica

    in_virtual_time(main())


def test_replica_that_comes_back_without_a_known_cache_makes_no_call_wait() -> None:
    waits = Waits()

    async def main() -> None:
        await waits.arrive("a#0", 900)
        waits.admission.failed("gpu")
        paused = asyncio.create_task(waits.arrive("b#0", 800))
        await asyncio.sleep(1)
        assert not paused.done()
        waits.admission.report("gpu", None)
        assert await paused is None
        assert await waits.arrive("c#0", 800) is None

    in_virtual_time(main())


def test_nothing_waits_if_a_replica_does_not_report_its_cache() -> None:
    waits = Waits()
    waits.usable = ["gpu", "silent"]

    async def main() -> None:
        assert await waits.arrive("a#0", 900) is None
        assert await waits.arrive("b#0", 900) is None

    in_virtual_time(main())
    assert waits.waited == []


def test_paused_call_goes_when_a_session_that_left_after_it_came_has_been_away_for_long() -> None:
    waits = Waits()

    async def main() -> None:
        await waits.arrive("a#0", 800)
        paused = asyncio.create_task(waits.arrive("b#0", 400))
        await asyncio.sleep(1)
        waits.admission.ended("a", "a#0", 800, 0)
        await paused

    in_virtual_time(main())
    ((_, _), (waited_s, overdue)) = waits.waited
    assert not overdue
    assert waited_s == pytest.approx(1 + waits.admission.schedule.away.usual_s, abs=0.1)


def test_call_does_not_wait_for_the_timer_of_one_that_has_to_wait_for_longer() -> None:
    waits = Waits()
    waits.admission.report("cpu", 1000)

    async def main() -> None:
        for replica in ("gpu", "cpu"):  # cpu's session leaves 20 s after gpu's
            waits.usable = [replica]
            await waits.arrive(f"{replica}#0", 800)
            waits.admission.ended(replica, f"{replica}#0", 800, 0)
            await asyncio.sleep(20)
        for replica in ("cpu", "gpu"):
            waits.usable = [replica]
            paused.append(asyncio.create_task(waits.arrive(f"{replica}-next#0", 400)))
            await asyncio.sleep(0)
        await paused[1]
        assert not paused[0].done()
        await paused[0]

    paused: list[asyncio.Task[str | None]] = []
    waits.admission.schedule.away.usual_s = 50.0
    in_virtual_time(main())
    assert [waited_s for waited_s, _ in waits.waited[2:]] == pytest.approx([10, 30], abs=0.1)
