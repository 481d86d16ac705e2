"""Quotas that hold for several sessions and for all processes on a store."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from msgspec.structs import replace

from proxy.errors import QuotaReached, SessionError
from proxy.records import Quota, SessionStatus, Turn, TurnStatus
from proxy.store.protocol import Store, TurnConflict
from tests.proxy.store.conftest import Opener
from tests.proxy.store.test_conformance import a_session, an_intent, answered


async def with_sessions(
    store: Store, count: int = 2, *, max_turns: int | None = None, max_tokens: int | None = None
) -> list[str]:
    """The ids of sessions, after the quota `q` was created."""
    await store.set_quota("q", max_turns=max_turns, max_tokens=max_tokens, reset=False)
    ids = [f"s-{number}" for number in range(count)]
    for session_id in ids:
        assert await store.create_session(a_session(session_id, limits={"quota": "q"}))
    return ids


def ended(turn: Turn, tokens: int, status: TurnStatus = TurnStatus.DONE) -> Turn:
    ids, logprobs = np.full(tokens, 7, np.int32), np.zeros(tokens, np.float32)
    return replace(answered(turn), sampled_ids=ids, logprobs=logprobs, versions=(), status=status)


async def used(store: Store) -> tuple[int, int]:
    (quota,) = await store.get_quotas()
    return quota.turns, quota.tokens


async def test_turns_of_all_sessions_count_and_no_more_begin(store: Store) -> None:
    one, two = await with_sessions(store, max_turns=3)
    await store.begin_turn(an_intent(one), "q")
    await store.begin_turn(an_intent(two), "q")
    await store.commit_turn(ended(an_intent(two), 5), "q")
    await store.begin_turn(an_intent(one, 1), "q")
    with pytest.raises(QuotaReached, match="'q'"):
        await store.begin_turn(an_intent(two, 1), "q")
    assert len(await store.get_turns(two)) == 1
    assert await used(store) == (3, 5)


async def test_turn_that_was_never_sampled_does_not_count(store: Store) -> None:
    (one,) = await with_sessions(store, 1, max_turns=1)
    await store.begin_turn(an_intent(one), "q")
    await store.commit_turn(ended(an_intent(one), 0, TurnStatus.CUT), "q")
    await store.commit_turn(ended(an_intent(one), 0, TurnStatus.CUT), "q")  # repeated
    assert await used(store) == (0, 0)
    await store.begin_turn(an_intent(one, 1), "q")


async def test_turn_that_a_dead_process_left_open_does_not_count(opener: Opener) -> None:
    dead, alive = await opener(), await opener()
    (one,) = await with_sessions(dead, 1, max_turns=1)
    await dead.begin_turn(an_intent(one), "q")
    await dead.close()
    (turn,) = await alive.get_turns(one)
    assert turn.status is TurnStatus.CUT
    assert await used(alive) == (0, 0)
    await alive.get_turns(one)
    await alive.begin_turn(an_intent(one, 1), "q")


async def test_tokens_count_once_and_calls_in_flight_may_end_beyond_them(store: Store) -> None:
    one, two = await with_sessions(store, max_tokens=10)
    await store.begin_turn(an_intent(one), "q")
    await store.begin_turn(an_intent(two), "q")
    for _ in range(2):
        await store.commit_turn(ended(an_intent(one), 9), "q")
    await store.begin_turn(an_intent(one, 1), "q")
    await store.commit_turn(ended(an_intent(two), 6, TurnStatus.CUT), "q")
    assert await used(store) == (3, 15)
    with pytest.raises(QuotaReached):
        await store.begin_turn(an_intent(two, 1), "q")


async def test_turn_that_could_not_begin_does_not_count(store: Store) -> None:
    one, two = await with_sessions(store, max_turns=9)
    await store.begin_turn(an_intent(one), "q")
    with pytest.raises(TurnConflict):
        await store.begin_turn(an_intent(one), "q")
    await store.set_status(two, SessionStatus.COMPLETED, 2.0)
    with pytest.raises(SessionError):
        await store.begin_turn(an_intent(two), "q")
    assert await used(store) == (1, 0)


async def test_sessions_without_the_quota_are_free(store: Store) -> None:
    (one,) = await with_sessions(store, 1, max_turns=0)
    await store.begin_turn(an_intent(one))
    await store.commit_turn(answered(an_intent(one)))
    with pytest.raises(QuotaReached):
        await store.begin_turn(an_intent(one, 1), "another")
    assert await used(store) == (0, 0)


async def test_quota_is_changed_and_reset(store: Store) -> None:
    (one,) = await with_sessions(store, 1, max_turns=1)
    await store.begin_turn(an_intent(one), "q")
    more = await store.set_quota("q", max_turns=2, max_tokens=8, reset=False)
    assert more == Quota("q", max_turns=2, max_tokens=8, turns=1, tokens=0)
    await store.delete_session(one)
    assert (await store.get_quotas()) == [more]
    again = await store.set_quota("q", max_turns=2, max_tokens=None, reset=True)
    assert again == Quota("q", max_turns=2, max_tokens=None)


async def test_processes_that_begin_at_once_begin_no_more_than_the_quota(opener: Opener) -> None:
    stores = [await opener(), await opener()]
    ids = await with_sessions(stores[0], 12, max_turns=7)
    begun = await asyncio.gather(
        *(stores[n % 2].begin_turn(an_intent(one), "q") for n, one in enumerate(ids)),
        return_exceptions=True,
    )
    assert [type(each) for each in begun if each is not None] == [QuotaReached] * 5
    assert await used(stores[1]) == (7, 0)
    commits = [
        stores[n % 2].commit_turn(ended(an_intent(one), n), "q")
        for n, one in enumerate(ids)
        if begun[n] is None
    ]
    await asyncio.gather(*commits)
    assert (await used(stores[0]))[1] == sum(n for n, each in enumerate(begun) if each is None)


async def test_reset_while_calls_are_in_flight_never_counts_below_zero(store: Store) -> None:
    (one,) = await with_sessions(store, 1, max_turns=2)
    for index in range(2):
        await store.begin_turn(an_intent(one, index), "q")
    await store.commit_turn(ended(an_intent(one), 9, TurnStatus.DONE), "q")
    await store.set_quota("q", max_turns=2, max_tokens=None, reset=True)
    await store.commit_turn(ended(an_intent(one), 5, TurnStatus.DONE), "q")  # 4 tokens fewer
    await store.commit_turn(ended(an_intent(one, 1), 0, TurnStatus.CUT), "q")
    assert await used(store) == (0, 0)


async def test_removed_quota_allows_no_call_and_a_call_in_flight_ends(store: Store) -> None:
    (one,) = await with_sessions(store, 1)
    await store.begin_turn(an_intent(one), "q")
    assert await store.remove_quota("q")
    assert not await store.remove_quota("q")
    await store.commit_turn(ended(an_intent(one), 5), "q")
    with pytest.raises(QuotaReached, match="'q' is used up or was removed"):
        await store.begin_turn(an_intent(one, 1), "q")
    assert await store.get_quotas() == []
    await store.set_quota("q", max_turns=1, max_tokens=None, reset=False)
    await store.begin_turn(an_intent(one, 1), "q")
    assert await used(store) == (1, 0)


async def test_turn_that_is_closed_without_an_answer_does_not_count(store: Store) -> None:
    (one,) = await with_sessions(store, 1)
    for index in range(2):
        await store.begin_turn(an_intent(one, index), "q")
    await store.commit_turn(ended(an_intent(one), 5), "q")
    assert not await store.cut_own_turn(one, 0, "q")
    assert await used(store) == (2, 5)
    assert await store.cut_own_turn(one, 1, "q")
    assert not await store.cut_own_turn(one, 1, "q")
    assert await used(store) == (1, 5)
