"""What people read of a store; each test runs against each store."""

from __future__ import annotations

import dataclasses

import numpy as np
import orjson
from msgspec.structs import replace

from proxy.records import (
    ForkCause,
    Mark,
    Origin,
    Reward,
    RuleAction,
    SessionKind,
    SessionStatus,
    TurnStatus,
)
from proxy.store.browser import Grant, GrantKind, Position, SavedRule, SessionPage
from proxy.store.protocol import SessionFilter, Store
from tests.proxy.store.conftest import Opener
from tests.proxy.store.test_conformance import a_session, an_intent, answered, assert_same


async def test_sessions_come_newest_first_in_pages_with_their_numbers(store: Store) -> None:
    for number in range(5):
        await store.create_session(a_session(f"s-{number}", created_at=float(number // 2)))
    for index in range(3):
        await store.begin_turn(an_intent("s-3", index))
    await store.commit_turn(answered(an_intent("s-3", 2)))
    await store.add_reward("s-3", Reward("verifier", 0.5))
    first = await store.browser.sessions(SessionPage(limit=2))
    assert [each.session.session_id for each in first] == ["s-4", "s-3"]
    last = first[-1].session
    page = SessionPage(before=(last.created_at, last.session_id))
    rest = await store.browser.sessions(page)
    assert [each.session.session_id for each in rest] == ["s-2", "s-1", "s-0"]
    busy = first[1]
    assert (busy.turns, busy.running, busy.cut, busy.sampled_tokens) == (3, 2, 0, 2)
    assert (busy.longest_path, busy.last_at, busy.forks) == (25, 14.25, {"edited": 1})
    assert busy.session.rewards == [Reward("verifier", 0.5)]
    assert await store.browser.session("s-3") == busy
    assert await store.browser.session("s-9") is None
    assert first[0].last_at is None


async def test_sessions_are_selected_by_status_kind_and_prefix(store: Store) -> None:
    await store.create_session(a_session("a/1", kind=SessionKind.EVAL))
    await store.create_session(a_session("a/2", status=SessionStatus.COMPLETED))
    await store.create_session(a_session("b/1"))

    async def ids(**of: object) -> list[str]:
        found = await store.browser.sessions(SessionPage(**of))  # type: ignore[arg-type]
        return [each.session.session_id for each in found]

    assert await ids(id_prefix="a/") == ["a/2", "a/1"]
    assert await ids(kind=SessionKind.EVAL) == ["a/1"]
    assert await ids(status=SessionStatus.OPEN) == ["b/1", "a/1"]
    assert await ids(status=SessionStatus.EXPIRED) == []


async def test_heads_have_lengths_and_the_turn_that_a_request_follows(store: Store) -> None:
    await store.create_session(a_session())
    requests = [
        {"after": None, "tools": [], "messages": []},
        {"after": 0, "messages": []},
        {"same_as": 1},
    ]
    for index, request in enumerate(requests):
        await store.begin_turn(replace(an_intent(index=index), request=orjson.dumps(request)))
    await store.commit_turn(answered(an_intent(index=1)))
    heads = await store.browser.heads("task/7-a", 0, 10)
    assert [(head.after, head.same_as) for head in heads] == [(None, None), (0, None), (None, 1)]
    assert [head.status for head in heads] == ["open", "done", "open"]
    assert heads[2].fork_cause is ForkCause.EDITED
    one = heads[1]
    assert (one.new_tokens, one.sampled_tokens, one.shared_tokens) == (3, 2, 10)
    assert one.versions == answered(an_intent()).versions
    assert await store.browser.heads("task/7-a", 1, 1) == [one]
    turns = await store.browser.turns("task/7-a", [2, 0, 9])
    assert [turn.index for turn in turns] == [0, 2]
    assert_same(turns[0], (await store.get_turns("task/7-a"))[0])


async def test_a_branch_has_the_turns_that_it_refers_to(store: Store) -> None:
    await store.create_session(a_session())
    for index in range(3):
        await store.begin_turn(an_intent(index=index))
        await store.commit_turn(answered(an_intent(index=index)))
    await store.create_session(a_session("b", origin=Origin("task/7-a", turn=2)))
    await store.begin_turn(an_intent("b", index=2))
    heads = await store.browser.heads("b", 0, 10)
    assert [(h.session_id, h.index) for h in heads] == [("task/7-a", 0), ("task/7-a", 1), ("b", 2)]
    turns = await store.browser.turns("b", range(3))
    assert [turn.status for turn in turns] == ["context", "context", "open"]
    summary = await store.browser.session("b")
    assert summary is not None
    assert (summary.turns, summary.session.recorded_turns) == (1, 2)


async def test_turns_of_more_indexes_than_one_statement_takes(store: Store) -> None:
    await store.create_session(a_session())
    for index in range(3):
        await store.begin_turn(an_intent(index=index))
    turns = await store.browser.turns("task/7-a", range(1201))
    assert [turn.index for turn in turns] == [0, 1, 2]


async def test_forks_of_a_cause_come_newest_first(store: Store) -> None:
    await store.create_session(a_session())
    for index, at in enumerate([3.0, 1.0, 2.0]):
        cause = ForkCause.COMPACTION if index else ForkCause.EDITED
        turn = replace(an_intent(index=index), fork_cause=cause, started_at=at)
        await store.begin_turn(turn)
    found = await store.browser.forks(ForkCause.COMPACTION, 9.0, 10)
    assert [head.index for head in found] == [2, 1]
    assert [h.index for h in await store.browser.forks(ForkCause.COMPACTION, 2.0, 10)] == [1]
    assert await store.browser.forks(ForkCause.SIBLING, 9.0, 10) == []


async def test_recent_turns_and_events_are_followed_without_gap_or_repetition(
    opener: Opener,
) -> None:
    store, other = await opener(), await opener()
    await store.create_session(a_session())
    await store.begin_turn(an_intent(index=0))
    start = await other.browser.recent(None, 100)
    assert [head.index for head in start.begun] == [0]
    assert (start.answered, start.events) == ([], [])
    await store.commit_turn(answered(an_intent(index=0)))
    for index in (1, 2):
        await store.begin_turn(an_intent(index=index))
    await store.add_event("task/7-a", "refused", {"status": 400})
    news = await other.browser.recent(start.position, 1)
    assert [head.index for head in news.begun] == [1]
    assert [(head.index, head.status) for head in news.answered] == [(0, TurnStatus.DONE)]
    (event,) = news.events
    assert (event["session_id"], event["kind"], event["status"]) == ("task/7-a", "refused", 400)
    more = await other.browser.recent(Position.parse(str(news.position)), 100)
    assert [head.index for head in more.begun] == [2]
    assert (more.answered, more.events) == ([], [])
    last = await store.browser.recent(None, 2)
    assert [head.index for head in last.begun] == [1, 2]


def test_positions_of_another_form_are_none() -> None:
    assert Position.parse("17.16.3") == Position(17, 16, 3)
    for text in ("", "1.2", "1.2.3.4", "1.-2.3", "a.b.c", "1.2." + "9" * 30):
        assert Position.parse(text) is None


async def test_a_grant_is_taken_once_and_revoked_by_its_name(store: Store) -> None:
    link = Grant(b"\x00\xff", GrantKind.LINK, "started", 1.0, 2.5)
    keys = [Grant(bytes([n]), GrantKind.KEY, "ana", float(n)) for n in (1, 2)]
    for grant in (link, *keys):
        await store.browser.add_grant(grant)
    assert await store.browser.find_grant(link.digest) == link
    assert await store.browser.take_grant(link.digest) == link
    assert await store.browser.take_grant(link.digest) is None
    assert await store.browser.find_grant(link.digest) is None
    assert await store.browser.grants(GrantKind.KEY) == keys
    assert await store.browser.revoke_grants("ana") == 2
    assert await store.browser.revoke_grants("ana") == 0


async def test_token_arrays_are_not_read_for_pages(store: Store) -> None:
    """Their lengths are enough. A head of a turn of any length has the same size."""
    await store.create_session(a_session())
    turn = replace(an_intent(), prompt_ids=np.zeros(200_000, np.int32))
    await store.begin_turn(turn)
    (head,) = await store.browser.heads("task/7-a", 0, 1)
    assert head.new_tokens == 200_000
    assert not any(isinstance(getattr(head, name), np.ndarray) for name in head.__slots__)


async def test_marks_are_read_with_their_sessions_and_select_them(store: Store) -> None:
    for name in ("a", "b", "c"):
        await store.create_session(a_session(name))
    first = Mark("cheats", RuleAction.ZERO_REWARD, 2, 5.0, "rm tests/a.py")
    second = Mark("greets", RuleAction.MARK, 0, 4.0)
    assert await store.browser.add_mark("a", first)
    assert not await store.browser.add_mark("a", dataclasses.replace(first, turn=7))
    assert not await store.browser.add_mark("missing", first)
    assert await store.browser.add_mark("a", second)
    assert await store.browser.add_mark("c", second)
    session = await store.get_session("a")
    assert session is not None
    assert session.marks == [second, first]
    assert session.marked(RuleAction.ZERO_REWARD) == first
    summary = await store.browser.session("a")
    assert summary is not None
    assert summary.session.marks == [second, first]
    assert await store.browser.marks(["b", "c"]) == {"c": [second]}
    for rule, names in (("cheats", ["a"]), ("greets", ["a", "c"]), ("*", ["a", "c"]), ("x", [])):
        found = await store.browser.sessions(SessionPage(marked=rule))
        assert sorted(each.session.session_id for each in found) == names
        listed = await store.list_sessions(SessionFilter(marked=rule))
        assert [each.session_id for each in listed] == names
    await store.delete_session("a")
    assert await store.browser.marks(["a"]) == {}


async def test_rules_are_saved_once_per_name(store: Store) -> None:
    rule = SavedRule("cheats", b'{"edits_tests": true}', 1.0)
    assert await store.browser.save_rule(rule)
    assert not await store.browser.save_rule(dataclasses.replace(rule, created_at=2.0))
    assert await store.browser.saved_rules() == [rule]
    assert await store.browser.remove_rule("cheats")
    assert not await store.browser.remove_rule("cheats")
    assert await store.browser.saved_rules() == []
