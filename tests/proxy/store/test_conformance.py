"""The protocol of a store; each test runs against each store."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from itertools import pairwise

import numpy as np
import pytest
from msgspec.structs import replace

from proxy.errors import SessionError, StoreError
from proxy.records import (
    ALTERNATIVE,
    BranchMode,
    FinishReason,
    ForkCause,
    ImageSpan,
    Mark,
    Origin,
    RecordedImage,
    Reward,
    RuleAction,
    ServedPolicy,
    Session,
    SessionKind,
    SessionStatus,
    Turn,
    TurnStatus,
    VersionSpan,
)
from proxy.store.curation import keep
from proxy.store.protocol import DeliveryMark, SessionFilter, Store, TurnConflict, Undelivered
from tests.proxy.store.conftest import Opener

ID = "task/7-a"


def a_session(session_id: str = "task/7-a", **changes: object) -> Session:
    session = Session(
        session_id=session_id,
        key_hash=hashlib.sha256(session_id.encode()).digest(),
        kind=SessionKind.TRAIN,
        status=SessionStatus.OPEN,
        created_at=1.5,
        expires_at=99.5,
        sampling={"temperature": 1.0},
        limits={"max_turns": 3},
        metadata={"task": "ü"},
    )
    return dataclasses.replace(session, **changes)  # type: ignore[arg-type]


def an_intent(session_id: str = "task/7-a", index: int = 0) -> Turn:
    return Turn(
        session_id=session_id,
        index=index,
        parent=None if index == 0 else index - 1,
        shared_tokens=index * 10,
        fork_cause=ForkCause.EDITED if index == 2 else None,
        prompt_ids=np.array([1, 2, 2**31 - 1], np.int32),
        request_key=b"\x00request".ljust(48, b"\x01"),
        sampling={"temperature": 0.7, "stop": ["a"]},
        dialect="messages",
        images=(ImageSpan(1, 2, 9, "4aeb", "9f86", (1, 2, 4)),) if index == 1 else (),
        agent_id="sub-1",
        started_at=12.25,
    )


def answered(turn: Turn) -> Turn:
    return replace(
        turn,
        sampled_ids=np.array([5, 6], np.int32),
        logprobs=np.array([-0.125, -3.4028235e38], np.float32),
        versions=(VersionSpan(4, 0, 1), VersionSpan(5, 1, 2)),
        finish_reason=FinishReason.TOOL_CALLS,
        status=TurnStatus.DONE,
        answer_key=b"\xffanswer".ljust(48, b"\x01"),
        answer=b'{"role":"assistant"}',
        first_token_s=0.5,
        duration_s=2.0,
    )


def assert_same(one: Turn, other: Turn) -> None:
    for name in Turn.__struct_fields__:
        a, b = getattr(one, name), getattr(other, name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype
            assert a.tobytes() == b.tobytes(), name
        else:
            assert a == b, name


async def test_session_is_read_back_unchanged(store: Store) -> None:
    session = a_session()
    assert await store.create_session(session)
    assert await store.get_session(session.session_id) == session
    assert await store.find_by_key(session.key_hash) == session
    assert await store.get_session("TASK/7-A") is None
    assert await store.find_by_key(b"other") is None


async def test_second_session_with_the_same_id_changes_nothing(store: Store) -> None:
    first = a_session()
    assert await store.create_session(first)
    assert not await store.create_session(a_session(key_hash=b"another", created_at=77.0))
    assert await store.get_session(first.session_id) == first


async def test_turn_is_read_back_bit_for_bit(store: Store) -> None:
    await store.create_session(a_session())
    turns = [replace(an_intent(index=i), request=b'{"after":null}') for i in range(3)]
    for turn in turns:
        await store.begin_turn(turn)
        await store.commit_turn(replace(answered(turn), engine="gpu-0"))
    for got, turn in zip(await store.get_turns("task/7-a"), turns, strict=True):
        assert_same(got, replace(answered(turn), engine="gpu-0"))
    assert [t.index for t in await store.get_turns("task/7-a", since=2)] == [2]
    assert await store.get_turns("nobody") == []


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
async def test_routed_experts_are_read_back_in_their_type(
    store: Store, dtype: type[np.uint8 | np.uint16]
) -> None:
    await store.create_session(a_session())
    experts = (np.arange(12).reshape(3, 2, 2) * 20).astype(dtype)
    turns = [
        replace(answered(an_intent()), routed_experts=experts),
        answered(an_intent(index=1)),
    ]
    for turn in turns:
        await store.begin_turn(turn)
        await store.commit_turn(turn)
    for stored, turn in zip(await store.get_turns("task/7-a"), turns, strict=True):
        assert_same(stored, turn)
        if turn.routed_experts is not None and stored.routed_experts is not None:
            assert stored.routed_experts.shape == turn.routed_experts.shape


async def test_alternatives_are_read_back_bit_for_bit(store: Store) -> None:
    """Those of a cut turn, too; another process closes a turn without any."""
    await store.create_session(a_session())
    rows = np.array([[(6, -0.125), (5, -3.5)], [(7, -0.5), (-1, -np.inf)]], ALTERNATIVE)
    done = replace(answered(an_intent()), alternatives=rows)
    cut = replace(done, index=1, status=TurnStatus.CUT)
    for turn in (done, cut, an_intent(index=2)):
        await store.begin_turn(turn)
    for turn in (done, cut):
        await store.commit_turn(turn)
    await store.set_turn_status("task/7-a", 2, TurnStatus.CUT)
    *stored, closed = await store.get_turns("task/7-a")
    for found, turn in zip(stored, (done, cut), strict=True):
        assert_same(found, turn)
        assert found.alternatives is not None
        assert found.alternatives.shape == rows.shape
    assert closed.alternatives is None


async def test_turn_without_answer_is_open_while_its_proxy_lives(store: Store) -> None:
    await store.create_session(a_session())
    await store.begin_turn(an_intent())
    (turn,) = await store.get_turns("task/7-a")
    assert_same(turn, an_intent())
    assert turn.status is TurnStatus.OPEN


async def test_another_proxy_sees_a_living_proxys_turn_as_open(opener: Opener) -> None:
    one, two = await opener(), await opener()
    await one.create_session(a_session())
    await one.begin_turn(an_intent())
    assert (await two.get_turns("task/7-a"))[0].status is TurnStatus.OPEN
    await one.commit_turn(answered(an_intent()))
    assert (await two.get_turns("task/7-a"))[0].status is TurnStatus.DONE


async def test_turn_left_open_by_a_dead_proxy_is_cut(opener: Opener) -> None:
    one = await opener()
    await one.create_session(a_session())
    await one.begin_turn(an_intent())
    await one.close()
    two = await opener()
    assert (await two.get_turns("task/7-a"))[0].status is TurnStatus.CUT
    three = await opener()
    assert (await three.get_turns("task/7-a"))[0].status is TurnStatus.CUT


async def test_turn_that_another_proxy_has_cut_does_not_become_done(opener: Opener) -> None:
    one, two = await opener(), await opener()
    await one.create_session(a_session())
    await one.begin_turn(an_intent())
    await two.set_turn_status("task/7-a", 0, TurnStatus.CUT)
    with pytest.raises(StoreError, match=r"turn 0 .* was closed by another process"):
        await one.commit_turn(answered(an_intent()))
    partial = replace(answered(an_intent()), status=TurnStatus.CUT)
    await one.commit_turn(partial)
    assert_same((await two.get_turns("task/7-a"))[0], partial)


async def test_answer_may_be_recorded_twice(store: Store) -> None:
    await store.create_session(a_session())
    await store.begin_turn(an_intent())
    for _ in range(2):
        await store.commit_turn(answered(an_intent()))
    assert_same((await store.get_turns("task/7-a"))[0], answered(an_intent()))


async def test_second_turn_with_the_same_index_conflicts(opener: Opener) -> None:
    one, two = await opener(), await opener()
    await one.create_session(a_session())
    await one.begin_turn(an_intent())
    with pytest.raises(TurnConflict):
        await two.begin_turn(replace(an_intent(), request_key=b"other".ljust(48)))
    assert (await two.get_turns("task/7-a"))[0].request_key == an_intent().request_key


async def test_one_of_several_concurrent_turns_with_the_same_index_is_recorded(
    opener: Opener,
) -> None:
    stores = [await opener(), await opener()]
    await stores[0].create_session(a_session())
    calls = [s.begin_turn(an_intent(index=i)) for i in range(8) for s in stores for _ in range(2)]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert sum(o is None for o in outcomes) == 8
    assert sum(isinstance(o, TurnConflict) for o in outcomes) == 24
    assert [t.index for t in await stores[1].get_turns("task/7-a")] == list(range(8))


@pytest.mark.parametrize(
    ("status", "code"), [(SessionStatus.COMPLETED, 409), (SessionStatus.EXPIRED, 410)]
)
async def test_turn_cannot_be_begun_in_a_closed_session(
    opener: Opener, status: SessionStatus, code: int
) -> None:
    one, two = await opener(), await opener()
    await one.create_session(a_session())
    assert await one.set_status("task/7-a", status, at=50.0)
    with pytest.raises(SessionError) as refused:
        await two.begin_turn(an_intent())
    assert refused.value.status == code
    assert await two.get_turns("task/7-a") == []
    session = await two.get_session("task/7-a")
    assert session is not None
    assert (session.status, session.completed_at) == (status, 50.0)


async def test_turn_of_an_unknown_session_is_refused(store: Store) -> None:
    with pytest.raises(SessionError) as refused:
        await store.begin_turn(an_intent("nobody"))
    assert refused.value.status == 404
    assert not await store.set_status("nobody", SessionStatus.COMPLETED, at=1.0)


async def test_setting_a_turns_status_changes_nothing_else(store: Store) -> None:
    await store.create_session(a_session())
    await store.begin_turn(an_intent())
    await store.commit_turn(answered(an_intent()))
    await store.set_turn_status("task/7-a", 0, TurnStatus.SUPERSEDED)
    (turn,) = await store.get_turns("task/7-a")
    assert_same(turn, replace(answered(an_intent()), status=TurnStatus.SUPERSEDED))


async def test_open_turn_can_be_cut_without_an_answer(store: Store) -> None:
    await store.create_session(a_session())
    await store.begin_turn(an_intent())
    await store.set_turn_status("task/7-a", 0, TurnStatus.CUT)
    (turn,) = await store.get_turns("task/7-a")
    assert_same(turn, replace(an_intent(), status=TurnStatus.CUT))


async def test_session_is_held_by_the_process_with_an_open_turn(opener: Opener) -> None:
    one, two = await opener(), await opener()
    await one.create_session(a_session())
    await one.announce("http://one")
    assert await two.holder("task/7-a") is None
    await one.begin_turn(an_intent())
    assert await two.holder("task/7-a") == "http://one"
    assert await one.holder("task/7-a") is None
    assert await two.holder("other") is None
    await one.commit_turn(answered(an_intent()))
    assert await two.holder("task/7-a") == "http://one"  # the answer has not arrived yet
    await one.mark_deliveries([DeliveryMark("task/7-a", 0, arrived=True)])
    assert await two.holder("task/7-a") is None


async def test_undelivered_answers_are_those_that_are_not_marked_as_arrived(
    opener: Opener,
) -> None:
    one, two = await opener(), await opener()
    await one.create_session(a_session())
    for index in range(4):
        await one.begin_turn(an_intent(index=index))
    for index in range(3):
        await one.commit_turn(answered(an_intent(index=index)))
    marks = [DeliveryMark("task/7-a", 0, arrived=True), DeliveryMark("task/7-a", 1, arrived=False)]
    await one.mark_deliveries([*marks, DeliveryMark("unknown", 0, arrived=True)])
    assert await one.undelivered("task/7-a") == Undelivered(lost=frozenset({1}))
    assert await two.undelivered("task/7-a") == Undelivered(frozenset({1}), frozenset({2}))
    await one.close()
    assert await two.undelivered("task/7-a") == Undelivered(lost=frozenset({1, 2}))
    await two.mark_deliveries([DeliveryMark("task/7-a", 1, arrived=True)])
    assert await two.undelivered("task/7-a") == Undelivered(lost=frozenset({2}))
    await two.delete_session("task/7-a")
    assert await two.undelivered("task/7-a") == Undelivered()


async def test_own_turn_is_cut_only_by_its_process_and_only_while_it_is_open(
    opener: Opener,
) -> None:
    one, two = await opener(), await opener()
    await one.create_session(a_session())
    await one.begin_turn(an_intent())
    await one.begin_turn(an_intent(index=1))
    await one.commit_turn(answered(an_intent(index=1)))
    assert not await two.cut_own_turn("task/7-a", 0)
    assert await one.cut_own_turn("task/7-a", 0)
    assert not await one.cut_own_turn("task/7-a", 1)
    assert not await one.cut_own_turn("task/7-a", 2)
    turns = await two.get_turns("task/7-a")
    assert [turn.status for turn in turns] == [TurnStatus.CUT, TurnStatus.DONE]


async def test_session_is_released_when_its_process_withdraws_or_ends(opener: Opener) -> None:
    one, two, three = await opener(), await opener(), await opener()
    await one.create_session(a_session())
    for index, store in enumerate((one, two)):
        await store.begin_turn(an_intent(index=index))
        await store.announce(f"http://{index}")
    await one.announce(None)
    assert await three.holder("task/7-a") == "http://1"
    await two.close()
    assert await three.holder("task/7-a") is None


async def test_reward_is_idempotent_by_key(store: Store) -> None:
    await store.create_session(a_session())
    first = Reward(key="verifier", value=1.0, parts={"tests": 0.5})
    branch = Reward(key="judge", value=-2.5, turn=1, branch=True)
    assert await store.add_reward("task/7-a", first)
    assert not await store.add_reward("task/7-a", Reward(key="verifier", value=0.0))
    assert await store.add_reward("task/7-a", branch)
    session = await store.get_session("task/7-a")
    assert session is not None
    assert session.rewards == [first, branch]


async def test_living_processes_that_serve_the_store_are_known(opener: Opener) -> None:
    one, two, three = [await opener() for _ in range(3)]
    await one.announce("http://127.0.0.1:1")
    await two.announce("unix:/tmp/two")
    assert sorted(await three.serving()) == ["http://127.0.0.1:1", "unix:/tmp/two"]
    await one.announce(None)
    await two.close()
    assert await three.serving() == []


async def test_rating_replaces_the_one_before_and_no_other_reward(store: Store) -> None:
    for name in ("a", "b"):
        await store.create_session(a_session(name, key_hash=name.encode() * 32))
        await store.add_reward(name, Reward(key="verifier", value=1.0))
    for value in (1.0, -0.5):
        await store.set_reward("a", Reward("rating", value, {"tone": value}, turn=3, branch=True))
    found = {name: await store.get_session(name) for name in ("a", "b")}
    assert found["a"] is not None
    assert found["b"] is not None
    assert found["a"].rewards == [
        Reward("verifier", 1.0),
        Reward("rating", -0.5, {"tone": -0.5}, turn=3, branch=True),
    ]
    assert found["b"].rewards == [Reward("verifier", 1.0)]


async def test_metadata_are_replaced_only_if_nobody_changed_them(store: Store) -> None:
    await store.create_session(a_session())
    before = {"task": "ü"}
    assert not await store.replace_metadata("task/7-a", {}, {"lost": "yes"})
    assert not await store.replace_metadata("other", before, {})
    assert await store.replace_metadata("task/7-a", before, {**before, "topic": "tests"})
    assert not await store.replace_metadata("task/7-a", before, {"lost": "yes"})
    session = await store.get_session("task/7-a")
    assert session is not None
    assert session.metadata == {"task": "ü", "topic": "tests"}


async def test_a_tag_removes_no_other_empty_value(store: Store) -> None:
    metadata = {"branch": "", "n": 0, "old": "x"}
    await store.create_session(a_session(metadata=metadata))
    await keep(store, "task/7-a", tags={"topic": "x", "old": ""})
    session = await store.get_session("task/7-a")
    assert session is not None
    assert session.metadata == {"branch": "", "n": 0, "topic": "x"}


async def test_people_tag_a_session_at_once_and_no_tag_is_lost(store: Store) -> None:
    await store.create_session(a_session())
    await asyncio.gather(*(keep(store, "task/7-a", tags={f"tag{n}": "yes"}) for n in range(8)))
    session = await store.get_session("task/7-a")
    assert session is not None
    assert session.metadata == {"task": "ü"} | {f"tag{n}": "yes" for n in range(8)}
    with pytest.raises(ValueError, match="would have 109 tags; at most 100"):
        await keep(store, "task/7-a", tags={f"more{n}": "yes" for n in range(100)})
    with pytest.raises(ValueError, match="is not a finite number"):
        await keep(store, "task/7-a", value=float("inf"))
    with pytest.raises(ValueError, match="has 4001 characters; at most 4000"):
        await keep(store, "task/7-a", comment="x" * 4001)
    with pytest.raises(SessionError, match="is not in this store"):
        await keep(store, "other", value=1.0)


async def test_page_reads_what_was_asked_and_said_last(store: Store) -> None:
    await store.create_session(a_session())
    await store.create_session(a_session("other"))
    await store.begin_turn(an_intent())
    (turn,) = await store.get_turns("task/7-a")
    assert await store.browser.requests("task/7-a", 0, 9) == [turn.request]
    assert await store.browser.requests("task/7-a", 1, 9) == []
    for value in (1.0, 0.0):
        await keep(store, "task/7-a", value=value, comment=f"It is {value:g}.")
    said = await store.browser.last_events(["task/7-a", "other"], "rating")
    assert {name: each["comment"] for name, each in said.items()} == {"task/7-a": "It is 0."}


async def test_deleting_a_session_removes_all_its_data(store: Store) -> None:
    await store.create_session(a_session())
    await store.begin_turn(an_intent())
    await store.add_reward("task/7-a", Reward(key="verifier", value=1.0))
    await store.add_event("task/7-a", "refused", {})
    assert await store.delete_session("task/7-a")
    assert not await store.delete_session("task/7-a")
    with pytest.raises(SessionError):
        await store.commit_turn(answered(an_intent()))
    await store.create_session(a_session())
    assert await store.get_turns("task/7-a") == []
    assert await store.get_events("task/7-a") == []
    assert (await store.list_sessions(SessionFilter()))[0].rewards == []


def an_image(data: bytes = b"\x89PNG pixels") -> RecordedImage:
    return RecordedImage(hashlib.sha256(data).hexdigest(), "image/png", data)


async def test_image_is_kept_once_until_the_last_session_that_has_it_is_removed(
    store: Store,
) -> None:
    image, other = an_image(), an_image(b"other")
    for session_id in ("a", "b", "c"):
        await store.create_session(a_session(session_id))
    await store.add_images("a", [image, other])
    await store.add_images("b", [replace(image, media_type="ignored")])
    await store.add_images("b", [image])
    assert await store.get_image(image.sha256) == image
    assert await store.delete_session("a")
    assert await store.get_image(image.sha256) == image
    assert await store.get_image(other.sha256) is None
    await store.set_status("b", SessionStatus.COMPLETED, 1.0)
    assert await store.remove_ended(2.0, 10) == 1
    assert await store.get_image(image.sha256) is None


async def test_image_of_a_session_that_does_not_exist_is_not_kept(store: Store) -> None:
    with pytest.raises(SessionError) as error:
        await store.add_images("nobody", [an_image()])
    assert error.value.status == 404
    assert await store.get_image(an_image().sha256) is None


async def test_image_that_is_not_what_was_recorded_is_an_error(store: Store) -> None:
    """Its bytes are what a trainer computes pixels from."""
    await store.create_session(a_session("a"))
    damaged = replace(an_image(), data=b"other bytes")
    await store.add_images("a", [damaged])
    with pytest.raises(StoreError, match="other bytes"):
        await store.get_image(damaged.sha256)


async def test_images_are_added_while_those_of_other_sessions_are_removed(store: Store) -> None:
    image, names = an_image(), [f"s{n}" for n in range(12)]
    for name in names:
        await store.create_session(a_session(name))
    await store.add_images(names[0], [image])
    for before, name in pairwise(names):
        await asyncio.gather(store.add_images(name, [image]), store.delete_session(before))
        assert await store.get_image(image.sha256) == image


async def test_events_after_the_given_number_are_returned_in_order(store: Store) -> None:
    await store.create_session(a_session())
    await store.create_session(a_session("other"))
    first = await store.add_event("task/7-a", "refused", {"status": 400, "field": "n"})
    await store.add_event("other", "noise", {})
    second = await store.add_event("task/7-a", "completed", {})
    events = await store.get_events("task/7-a")
    assert [(e["seq"], e["kind"]) for e in events] == [(first, "refused"), (second, "completed")]
    assert events[0]["field"] == "n"
    assert [e["seq"] for e in await store.get_events("task/7-a", since=first)] == [second]


async def test_sessions_are_listed_by_filter_and_page(store: Store) -> None:
    for name in ("a-1", "a-2", "a-3", "b-1"):
        await store.create_session(a_session(name))
    await store.create_session(a_session("a-4", kind=SessionKind.EVAL))
    await store.set_status("a-2", SessionStatus.COMPLETED, at=2.0)

    async def ids(**where: object) -> list[str]:
        found = await store.list_sessions(SessionFilter(**where))  # type: ignore[arg-type]
        return [s.session_id for s in found]

    assert await ids() == ["a-1", "a-2", "a-3", "a-4", "b-1"]
    assert await ids(id_prefix="a-", kind=SessionKind.TRAIN) == ["a-1", "a-2", "a-3"]
    assert await ids(status=SessionStatus.COMPLETED) == ["a-2"]
    assert await ids(limit=2) == ["a-1", "a-2"]
    assert await ids(after="a-2", limit=2) == ["a-3", "a-4"]


async def a_parent(store: Store, turns: int = 3, session_id: str = "task/7-a") -> None:
    await store.create_session(a_session(session_id))
    for index in range(turns):
        await store.begin_turn(an_intent(session_id, index))
        await store.commit_turn(answered(an_intent(session_id, index)))


async def recorded_by(store: Store, session_id: str) -> list[tuple[str, int, TurnStatus]]:
    turns = await store.get_turns(session_id)
    return [(turn.session_id, turn.index, turn.status) for turn in turns]


DONE, CONTEXT, CUT = TurnStatus.DONE, TurnStatus.CONTEXT, TurnStatus.CUT


async def test_branch_is_read_back_with_its_origin(store: Store) -> None:
    await a_parent(store)
    origin = Origin("task/7-a", 2, BranchMode.LIVE, True, system="Be brief.", answer="5")
    branch = a_session("b", origin=origin)
    assert await store.create_session(branch)
    assert await store.get_session("b") == branch
    assert await store.find_by_key(branch.key_hash) == branch


async def test_first_turns_of_a_branch_are_those_of_its_origin(store: Store) -> None:
    await a_parent(store)
    await store.create_session(a_session("b", origin=Origin("task/7-a", 2)))
    await store.begin_turn(an_intent("b", 2))
    assert await recorded_by(store, "b") == [
        ("task/7-a", 0, CONTEXT),
        ("task/7-a", 1, CONTEXT),
        ("b", 2, TurnStatus.OPEN),
    ]
    first = (await store.get_turns("b"))[0]
    assert_same(replace(first, status=DONE), answered(an_intent()))
    assert [turn.index for turn in await store.get_turns("b", since=1, until=2)] == [1]
    assert {status for _, _, status in await recorded_by(store, "task/7-a")} == {DONE}


@pytest.mark.parametrize("salvage", [False, True])
async def test_branch_of_a_branch_has_the_turns_of_both(store: Store, salvage: bool) -> None:
    await a_parent(store)
    await store.create_session(a_session("b", origin=Origin("task/7-a", 2, salvage=salvage)))
    for index in (2, 3):
        await store.begin_turn(an_intent("b", index))
        await store.commit_turn(answered(an_intent("b", index)))
    await store.create_session(a_session("c", origin=Origin("b", 3, salvage=salvage)))
    await store.create_session(a_session("d", origin=Origin("b", 1)))
    shared = DONE if salvage else CONTEXT
    assert await recorded_by(store, "c") == [
        ("task/7-a", 0, shared),
        ("task/7-a", 1, shared),
        ("b", 2, shared),
    ]
    assert await recorded_by(store, "d") == [("task/7-a", 0, CONTEXT)]
    kept = [status for _, _, status in await recorded_by(store, "b")]
    assert kept == ([CONTEXT] * 3 if salvage else [CONTEXT] * 2 + [DONE]) + [DONE]


async def test_a_salvaged_turn_is_trained_in_one_session(store: Store) -> None:
    await a_parent(store)
    assert await store.create_session(a_session("b", origin=Origin("task/7-a", 2, salvage=True)))
    statuses = [status for _, _, status in await recorded_by(store, "task/7-a")]
    assert statuses == [CONTEXT, CONTEXT, DONE]
    assert [status for _, _, status in await recorded_by(store, "b")] == [DONE, DONE]
    with pytest.raises(SessionError, match="is salvaged by 'b' already") as refused:
        await store.create_session(a_session("c", origin=Origin("task/7-a", 1, salvage=True)))
    assert refused.value.status == 409
    assert await store.create_session(a_session("c", origin=Origin("task/7-a", 1)))


async def test_branch_of_an_unknown_session_is_refused(store: Store) -> None:
    with pytest.raises(SessionError, match="'nobody' does not exist") as refused:
        await store.create_session(a_session("b", origin=Origin("nobody", 1)))
    assert refused.value.status == 404
    assert await store.get_session("b") is None


async def test_origin_is_kept_while_a_branch_refers_to_it(store: Store) -> None:
    await a_parent(store)
    await store.create_session(a_session("b", origin=Origin("task/7-a", 2)))
    await store.set_status("task/7-a", SessionStatus.COMPLETED, at=5.0)
    with pytest.raises(SessionError, match="1 branches refer to its turns") as refused:
        await store.delete_session("task/7-a")
    assert refused.value.status == 409
    assert await store.remove_ended(10.0, 10) == 0
    assert len(await store.get_turns("b")) == 2
    await store.set_status("b", SessionStatus.COMPLETED, at=6.0)
    assert await store.remove_ended(10.0, 10) == 1
    assert await store.remove_ended(10.0, 10) == 1
    assert await store.get_turns("task/7-a") == []


async def test_replayed_turns_of_a_branch_are_remembered(opener: Opener) -> None:
    store = await opener()
    await a_parent(store)
    await store.mark_deliveries([DeliveryMark("task/7-a", 1, arrived=True)])
    await store.create_session(a_session("b", origin=Origin("task/7-a", 2)))
    assert await store.undelivered("b") == Undelivered()
    marks = [DeliveryMark("b", 0, arrived=True), DeliveryMark("b", 1, arrived=False)]
    await store.mark_deliveries(marks)
    assert (await (await opener()).undelivered("b")).replayed == {0}


async def test_current_version_of_each_policy_is_kept(opener: Opener) -> None:
    """A lower version also replaces a higher one: a run was resumed from an earlier checkpoint."""
    store = await opener()
    coder, planner = ServedPolicy("coder", 3, "coder@3.aa"), ServedPolicy("planner", 9, "p@9.bb")
    assert await store.get_policies() == []
    for served in (coder, planner, ServedPolicy("planner", 2, "p@2.cc")):
        assert await store.publish_policy(served)
    again = await opener()
    found = sorted(await again.get_policies(), key=lambda served: served.name)
    assert found == [coder, ServedPolicy("planner", 2, "p@2.cc")]


async def test_policy_of_a_run_gets_no_version_of_another_until_it_is_released(
    opener: Opener,
) -> None:
    store, other = await opener(), await opener()

    async def publishes(version: int, run: str) -> bool:
        return await other.publish_policy(ServedPolicy("planner", version, f"p@{version}", run))

    assert await store.publish_policy(ServedPolicy("planner", 1, "p@1"))
    assert await publishes(2, "first")
    assert await publishes(3, "first")
    assert not await publishes(4, "second")
    assert not await publishes(5, "")
    await other.release_policy("planner", "second")
    (served,) = await store.get_policies()
    assert (served.version, served.run) == (3, "first")
    await other.release_policy("planner", "first")
    assert await publishes(6, "second")
    (served,) = await store.get_policies()
    assert (served.version, served.run) == (6, "second")


async def test_nothing_is_added_to_a_session_that_was_removed(opener: Opener) -> None:
    """As by a proxy that does not know yet; the next session of its name would have it."""
    store, other = await opener(), await opener()
    await store.create_session(a_session())
    await store.begin_turn(an_intent())
    await store.commit_turn(answered(an_intent()))
    assert await other.delete_session(ID)
    image = RecordedImage("0" * 64, "image/png", b"png")
    late = (
        store.add_reward(ID, Reward("late", 1.0)),
        store.set_reward(ID, Reward("late", 1.0)),
        store.add_event(ID, "refused", {"message": "late"}),
        store.add_images(ID, [image]),
        store.begin_turn(an_intent()),
    )
    for each in late:
        with pytest.raises(SessionError, match="does not exist"):
            await each
    with pytest.raises(SessionError, match="was the session deleted"):
        await store.commit_turn(answered(an_intent()))
    await store.mark_deliveries([DeliveryMark(ID, 0, arrived=True)])
    mark = Mark("late", RuleAction.MARK, 0, 1.0, "late")
    assert not await store.browser.add_mark(ID, mark)
    assert await store.create_session(a_session(key_hash=b"another".ljust(32)))
    session = await store.get_session(ID)
    assert session is not None
    assert (session.rewards, session.marks) == ([], [])
    assert await store.get_events(ID) == []
    assert await store.get_turns(ID) == []
    assert await store.get_image(image.sha256) is None
