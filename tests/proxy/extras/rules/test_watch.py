"""Search rules on the turns of a real proxy: marks, ends, and rewards of 0."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from pydantic import ValidationError

from proxy.client import SessionHandle
from proxy.config import ProxyConfig
from proxy.conversation.messages import Message, dump_answer
from proxy.errors import StoreError
from proxy.extras.rules import watch as watching
from proxy.extras.rules.rules import RuleConfig, RuleQuery
from proxy.extras.rules.watch import RuleWatch
from proxy.extras.view.access import new_key
from proxy.metrics import Metrics
from proxy.records import Mark, Reward, RuleAction, Turn
from proxy.search.terms import MatchingTime, MatchJson, SearchTerms
from proxy.store import open_store
from proxy.store.browser import Browser, SavedRule, WrittenTurn
from proxy.store.protocol import Store
from tests.proxy.conftest import ADMIN_KEY, RunningProxy, StartProxy
from tests.proxy.extras.view.recording import call, user
from tests.proxy.extras.view.test_api import Reader
from tests.proxy.store.test_conformance import a_session, an_intent, answered

CHEAT = '<tool_call>\n{"name": "shell", "arguments": {"command": "rm tests/a.py"}}\n</tool_call>'


def a_rule(name: str, action: str = "mark", **query: Any) -> RuleConfig:
    return RuleConfig(name=name, query=RuleQuery(**query), action=RuleAction(action))


async def metrics(proxy: RunningProxy) -> str:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    async with proxy.http.get(proxy.url + "/metrics", headers=headers) as response:
        return await response.text()


async def until_marked(proxy: RunningProxy, session: SessionHandle) -> list[dict[str, Any]]:
    async with asyncio.timeout(60):
        while not (  # noqa: ASYNC110 (the mark is set in the background)
            marks := (await proxy.control.show(session.trial_id))["marks"]
        ):
            await asyncio.sleep(0.02)
    found: list[dict[str, Any]] = marks
    return found


async def test_rule_marks_a_session_live_and_is_counted(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(rules=[a_rule("cheats", edits_tests=True, answers_only=True)])
    cheater, honest = await proxy.session(), await proxy.session()
    await call(proxy, honest, [user("Run rm tests/a.py")])
    proxy.answers(CHEAT)
    await call(proxy, cheater, [user("Make the tests pass.")])
    (mark,) = await until_marked(proxy, cheater)
    assert (mark["rule"], mark["action"], mark["turn"]) == ("cheats", "mark", 0)
    assert mark["found"] == "tests/a.py"
    await call(proxy, cheater, [user("Once more.")])
    await proxy.control.complete(cheater.trial_id)
    await proxy.control.complete(honest.trial_id)
    record, _ = await proxy.record(cheater)
    assert [each.turn for each in record.marks] == [0]
    assert (await proxy.record(honest))[0].marks == []
    assert 'agentic_proxy_rule_hits_total{rule="cheats"} 1.0' in await metrics(proxy)
    for marked in ("cheats", "*"):
        (listed,) = await proxy.control.list_sessions(marked=marked)
        assert listed["trial_id"] == cheater.trial_id
    assert await proxy.control.list_sessions(marked="other") == []
    events = [event["kind"] async for event in proxy.control.events(cheater.trial_id)]
    assert events == ["marked", "completed"]


async def test_reward_is_zero_where_a_rule_says_so(start_proxy: StartProxy) -> None:
    rule = a_rule("cheats", "zero_reward", edits_tests=True)
    proxy = await start_proxy(rules=[rule])
    session = await proxy.session(trial_id="cheater")
    proxy.answers(CHEAT)
    await call(proxy, session, [user("Make the tests pass.")])
    await proxy.control.add_reward("cheater", Reward("verifier", 1.0))
    # The mark is there when `complete` returns, however late the rules are matched.
    await proxy.control.complete("cheater")
    record, _ = await proxy.record(session)
    assert record.marked(RuleAction.ZERO_REWARD) is not None
    assert record.rewards == [Reward("verifier", 1.0)]
    (shown,) = (await Reader(proxy.http, proxy.url).get("sessions"))["sessions"]
    assert shown["reward"] == 0.0
    assert [mark["rule"] for mark in shown["marks"]] == ["cheats"]


async def test_trial_is_ended_where_a_rule_says_so(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(rules=[a_rule("stop", "end", regex="give up", answers_only=True)])
    session = await proxy.session()
    await call(proxy, session, [user("Do not give up.")])
    proxy.answers("I give up.")
    await call(proxy, session, [user("Go on.")])
    async with asyncio.timeout(60):
        assert await proxy.control.wait_completed(session.trial_id, timeout_s=60)
    body = {"model": "m", "messages": [user("And now?")]}
    assert (await proxy.post(session, "chat/completions", body))[0] == 409
    (mark,) = (await proxy.control.show(session.trial_id))["marks"]
    assert (mark["action"], mark["turn"]) == ("end", 1)


async def test_rule_saved_from_the_page_marks_and_can_do_nothing_else(
    start_proxy: StartProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "READ_S", 0.0)
    proxy = await start_proxy()
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}

    async def post(path: str, status: int, **body: Any) -> str:
        url = f"{proxy.url}/view/{path}"
        async with proxy.http.post(url, json=body, headers=headers) as response:
            assert response.status == status, await response.text()
            return await response.text()

    query = {"text": "hello"}
    await post("rules", 200, name="greets", query=query, action="zero_reward")
    assert "exists" in await post("rules", 409, name="greets", query=query)
    assert "name" in await post("rules", 400, name="a b", query=query)
    assert "regex" in await post("rules", 400, name="a", query={"regex": "("})
    assert "give text" in await post("rules", 400, name="a", query={})
    session = await proxy.session()
    await call(proxy, session, [user("Hi.")])
    (mark,) = await until_marked(proxy, session)
    assert (mark["rule"], mark["action"]) == ("greets", "mark")
    reader = Reader(proxy.http, proxy.url)
    shown = await reader.get("rules")
    assert shown["rules"] == [
        {"name": "greets", "query": query, "action": "mark", "configured": False}
    ]
    await post("rules/remove", 200, name="greets")
    await post("rules/remove", 404, name="greets")
    assert (await reader.get("rules"))["rules"] == []


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    store = await open_store(f"sqlite:///{tmp_path}/s.db")
    await store.create_session(a_session("s"))
    yield store
    await store.close()


async def written(store: Store, text: str = "Hello.") -> None:
    """Records the first turn of the session, with this answer."""
    answer = dump_answer(Message("assistant", text))
    await store.begin_turn(an_intent("s"))
    await store.commit_turn(replace(answered(an_intent("s")), answer=answer))


async def nothing(session_id: str, mark: Mark) -> None:
    pass


async def test_turns_of_an_earlier_process_are_matched_when_the_session_ends(store: Store) -> None:
    await written(store)
    watch = RuleWatch(store, [a_rule("all", regex="(?s).")], Metrics(), nothing)
    await watch.settled("s")
    session = await store.get_session("s")
    assert session is not None
    assert [mark.rule for mark in session.marks] == ["all"]


async def test_rule_that_takes_too_long_is_given_up_and_others_are_matched(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "RULE_S", 2.0)
    slow, fast = a_rule("slow", regex="(a|aa)+$"), a_rule("fast", text="b")
    await written(store, "a" * 200 + "b")
    counted = Metrics()
    await RuleWatch(store, [slow, fast], counted, nothing).settled("s")
    assert b'agentic_proxy_rules_given_up_total{rule="slow"} 1.0' in counted.exposition()
    assert [mark.rule for mark in (await store.browser.marks(["s"]))["s"]] == ["fast"]


async def test_store_that_fails_delays_the_marks_and_loses_none(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_mark, failures = store.browser.add_mark, 1

    async def failing(session_id: str, mark: Mark) -> bool:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise StoreError("the disk is full")
        return await add_mark(session_id, mark)

    monkeypatch.setattr(store.browser, "add_mark", failing)
    await written(store)
    watch = RuleWatch(store, [a_rule("all", regex="(?s).")], Metrics(), nothing)
    with pytest.raises(StoreError):
        await watch.settled("s")
    await watch.settled("s")
    session = await store.get_session("s")
    assert session is not None
    assert len(session.marks) == 1


@pytest.fixture
def odd_rule(monkeypatch: pytest.MonkeyPatch) -> RuleConfig:
    """A rule that has a bug, which is not that of the store."""
    matches = SearchTerms.matches

    def wrong(terms: SearchTerms, turn: WrittenTurn, left: MatchingTime) -> list[MatchJson] | None:
        if terms.tool == "odd":
            raise KeyError("odd")
        return matches(terms, turn, left)

    monkeypatch.setattr(SearchTerms, "matches", wrong)
    return a_rule("odd", tool="odd")


async def test_error_of_a_rule_is_reported_and_the_others_are_matched_also_later(
    start_proxy: StartProxy, odd_rule: RuleConfig, caplog: pytest.LogCaptureFixture
) -> None:
    proxy = await start_proxy(rules=[odd_rule, a_rule("all", regex="(?s).")])
    for _ in range(2):
        session = await proxy.session()
        await call(proxy, session, [user("Hi.")])
        marks = await until_marked(proxy, session)
        assert [each["rule"] for each in marks] == ["all"]
        await proxy.control.complete(session.trial_id)
    faults = (await Reader(proxy.http, proxy.url).get("state"))["rule_faults"]
    assert [(each["rule"], each["turn"], each["error"]) for each in faults] == [
        ("odd", 0, "KeyError: 'odd'")
    ] * 2
    assert faults[1]["session"] == session.trial_id
    assert 'agentic_proxy_rule_errors_total{rule="odd"} 2.0' in await metrics(proxy)
    logged = [record for record in caplog.records if "search rule odd failed" in record.message]
    assert len(logged) == 2
    assert logged[0].exc_info is not None


async def test_error_of_a_rule_is_counted_once_if_the_store_fails_meanwhile(
    store: Store, odd_rule: RuleConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_mark, failures = store.browser.add_mark, 3

    async def failing(session_id: str, mark: Mark) -> bool:
        nonlocal failures
        if mark.turn == 1 and failures:
            failures -= 1
            raise StoreError("the disk is full")
        return await add_mark(session_id, mark)

    monkeypatch.setattr(watching, "RETRY_S", 0.01)
    monkeypatch.setattr(store.browser, "add_mark", failing)
    await written(store)
    (turn,) = await store.get_turns("s")
    second = a_rule("second", regex="Other")
    watch = RuleWatch(store, [odd_rule, second], Metrics(), nothing)
    watch.recorded("s", turn)
    watch.recorded("s", replace(turn, index=1, answer=turn.answer.replace(b"Hello", b"Other")))
    watch.start()
    async with asyncio.timeout(60):
        while not (await store.browser.marks(["s"])):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await watch.close()
    assert failures == 0
    assert [each["turn"] for each in watch.faults] == [0, 1]


async def test_error_of_what_a_rule_does_ends_neither_the_matching_nor_the_session(
    store: Store,
) -> None:
    async def broken(session_id: str, mark: Mark) -> None:
        raise RuntimeError("cannot end it")

    await written(store)
    rules = [a_rule("ends", "end", regex="(?s)."), a_rule("all", regex="(?s).")]
    counted = Metrics()
    watch = RuleWatch(store, rules, counted, broken)
    await watch.settled("s")
    await watch.settled("s")
    assert {mark.rule for mark in (await store.browser.marks(["s"]))["s"]} == {"ends", "all"}
    assert watch.faults[0]["error"] == "RuntimeError: cannot end it"


async def test_fault_is_shown_without_credentials_and_without_half_a_character(
    store: Store,
) -> None:
    async def broken(session_id: str, mark: Mark) -> None:
        raise RuntimeError("http://user:hunter2@agent:9 said \ud800")

    await written(store)
    watch = RuleWatch(store, [a_rule("ends", "end", regex="(?s).")], Metrics(), broken)
    await watch.settled("s")
    assert watch.faults[0]["error"] == "RuntimeError: http://agent:9 said ?"


async def test_saved_rules_that_fail_to_load_leave_the_configured_ones(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(browser: Browser) -> list[RuleConfig]:
        raise LookupError("no such column")

    monkeypatch.setattr(watching, "saved_rules", broken)
    await written(store)
    watch = RuleWatch(store, [a_rule("all", regex="(?s).")], Metrics(), nothing)
    await watch.settled("s")
    assert [mark.rule for mark in (await store.browser.marks(["s"]))["s"]] == ["all"]
    assert [(each["rule"], each["session"]) for each in watch.faults] == [("", "")]


async def test_turns_that_cannot_be_read_do_not_keep_those_of_other_sessions_waiting(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    get_turns = store.get_turns

    async def broken(session_id: str, since: int = 0, until: int | None = None) -> list[Turn]:
        if session_id == "broken":
            raise ValueError("invalid bytes")
        return await get_turns(session_id, since, until)

    monkeypatch.setattr(watching, "WAITING_BYTES", 0)
    await written(store)
    (turn,) = await store.get_turns("s")
    monkeypatch.setattr(store, "get_turns", broken)
    watch = RuleWatch(store, [a_rule("all", regex="(?s).")], Metrics(), nothing)
    watch.recorded("broken", turn)
    watch.recorded("s", turn)
    watch.start()
    async with asyncio.timeout(60):
        while not (await store.browser.marks(["s"])):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await watch.settled("broken")
    assert {(each["session"], each["error"]) for each in watch.faults} == {
        ("broken", "ValueError: invalid bytes")
    }
    await watch.close()


async def test_text_beyond_the_bound_is_read_from_the_store(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "WAITING_BYTES", 0)
    await written(store)
    watch = RuleWatch(store, [a_rule("all", regex="(?s).")], Metrics(), nothing)
    (turn,) = await store.get_turns("s")
    watch.recorded("s", turn)
    watch.start()
    async with asyncio.timeout(60):
        while not (await store.browser.marks(["s"])):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await watch.close()


async def test_matched_turns_leave_room_for_others_while_the_store_fails(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await written(store)
    await store.create_session(dataclasses.replace(a_session("other"), key_hash=b"other"))
    (turn,) = await store.get_turns("s")
    add_mark = store.browser.add_mark
    failed, asked = asyncio.Event(), set[str]()

    async def failing(session_id: str, mark: Mark) -> bool:
        if mark.turn == 1:
            failed.set()
            raise StoreError("the disk is full")
        return await add_mark(session_id, mark)

    async def counted(session_id: str, since: int = 0, until: int | None = None) -> list[Turn]:
        asked.add(session_id)
        return [replace(turn, index=since)]

    monkeypatch.setattr(watching, "RETRY_S", 0.01)
    monkeypatch.setattr(watching, "WAITING_BYTES", len(turn.request) + len(turn.answer))
    monkeypatch.setattr(store.browser, "add_mark", failing)
    monkeypatch.setattr(store, "get_turns", counted)
    watch = RuleWatch(store, [a_rule("all", regex="(?s).")], Metrics(), nothing)
    watch.recorded("s", turn)
    watch.recorded("s", replace(turn, index=1))  # beyond the bound
    watch.start()
    async with asyncio.timeout(60):
        await failed.wait()
        watch.recorded("other", turn)
        while not (await store.browser.marks(["other"])):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await watch.close()
    assert asked == {"s"}


async def test_saved_rule_that_cannot_be_read_is_left_out(store: Store) -> None:
    await store.browser.save_rule(SavedRule("odd", b'{"words": "x"}', 1.0))
    await store.browser.save_rule(SavedRule("good", b'{"regex": "(?s)."}', 2.0))
    await written(store)
    await RuleWatch(store, [], Metrics(), nothing).settled("s")
    assert [mark.rule for mark in (await store.browser.marks(["s"]))["s"]] == ["good"]


def test_rules_that_cannot_be_used_are_refused() -> None:
    for wrong in ({}, {"regex": "("}, {"text": "a", "regex": "b"}, {"cause": "none"}):
        with pytest.raises(ValidationError):
            RuleQuery.model_validate(wrong)
    twice = [a_rule("a", text="x"), a_rule("a", text="y")]
    with pytest.raises(ValidationError, match="two rules have the name 'a'"):
        ProxyConfig(rules=twice)


async def test_key_for_reading_saves_no_rule(start_proxy: StartProxy, tmp_path: Path) -> None:
    store = await open_store(f"sqlite:///{tmp_path}/k.db")
    proxy = await start_proxy(store=store)
    headers = {"Authorization": f"Bearer {await new_key(store.browser, 'ana')}"}
    async with proxy.http.get(f"{proxy.url}/view/rules", headers=headers) as response:
        assert (await response.json())["may_save"] is False
    body = {"name": "a", "query": {"text": "x"}}
    for path in ("rules", "rules/remove"):
        url = f"{proxy.url}/view/{path}"
        async with proxy.http.post(url, json=body, headers=headers) as response:
            assert response.status == 403
    foreign = {"Authorization": f"Bearer {ADMIN_KEY}", "Origin": "http://evil.example"}
    async with proxy.http.post(f"{proxy.url}/view/rules", json=body, headers=foreign) as response:
        assert response.status == 403
    await store.close()
