"""Search over all sessions: what is found, and that each request does a bounded amount of work."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from proxy.errors import RequestError
from proxy.search import terms as search
from proxy.store import open_store
from proxy.store.browser import WrittenTurn
from tests.proxy.conftest import RunningProxy
from tests.proxy.extras.view.recording import call, record, user, work
from tests.proxy.extras.view.test_api import Reader
from tests.proxy.store.test_conformance import a_session, an_intent, answered


@pytest.fixture
def reader(proxy: RunningProxy) -> Reader:
    return Reader(proxy.http, proxy.url)


def places(found: Any) -> list[tuple[str, int]]:
    return [(hit["session"], hit["index"]) for hit in found["hits"]]


async def test_text_expression_tool_and_cause_are_found_in_what_was_written(
    proxy: RunningProxy, reader: Reader
) -> None:
    await record(proxy)
    other = await proxy.session(trial_id="other")
    await work(proxy, other, "Hello.", turns=1)
    found = await reader.get("search", text="THE SUM IS COMPUTED TWICE")
    # Turn 4 sent the history again, with changes.
    assert places(found) == [("fix/sum-1", 4), ("fix/sum-1", 1)]
    (match,) = found["hits"][1]["matches"]
    assert (match["role"], match["match"]) == ("assistant", "The sum is computed twice")
    assert found["next"] is None
    assert places(await reader.get("search", regex=r"cat src/sum\.py\b.*head")) == [
        ("fix/sum-1", 4)
    ]
    assert places(await reader.get("search", text="Hello", tool="shell")) == [("other", 0)]
    assert places(await reader.get("search", tool="none")) == []
    for cause in ("tool_arguments", "new_conversation"):
        for _, index in places(await reader.get("search", cause=cause)):
            head = (await reader.get("heads", session="fix/sum-1", since=index))["turns"][0]
            assert head["fork"] == cause


async def test_older_turns_are_read_by_the_next_request(
    proxy: RunningProxy, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.search.record.TURNS", 2)
    session = await proxy.session(trial_id="s")
    for number in range(5):
        await call(proxy, session, [user(f"question {number}")])
    found, before, reads = [], None, []
    while True:
        query = {"text": "question"} | ({} if before is None else {"before": before})
        page = await reader.get("search", **query)
        found += places(page)
        reads.append(page["read"])
        before = page["next"]
        if before is None:
            break
    assert found == [("s", index) for index in (4, 3, 2, 1, 0)]
    assert reads == [2, 2, 1]


async def test_a_request_reads_as_many_turns_as_fit_and_at_least_one(tmp_path: Path) -> None:
    store = await open_store(f"sqlite:///{tmp_path}/s.db")
    await store.create_session(a_session("s"))
    for index in range(4):
        await store.begin_turn(an_intent("s", index=index))
        await store.commit_turn(answered(an_intent("s", index=index)))
    whole = await store.browser.written(2**62, 100, 10**9)
    assert [turn.index for turn in whole] == [3, 2, 1, 0]
    size = len(whole[0].request) + len(whole[0].answer)
    few = await store.browser.written(2**62, 100, 2 * size + 1)
    assert [turn.index for turn in few] == [3, 2]
    one = await store.browser.written(few[-1].place, 100, 1)
    assert [turn.index for turn in one] == [1]
    assert await store.browser.written(1, 100, 10**9) == []
    await store.close()


def a_turn(text: str) -> WrittenTurn:
    request = b'{"after": null, "messages": [%b]}' % (
        b'{"role": "user", "text": "%b", "reasoning": null, "tool_calls": [],'
        b' "tool_call_id": null}' % text.encode()
    )
    return WrittenTurn(1, "s", 0, None, None, 0.0, request, b"")


def test_expression_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "REGEX_S", 0.05)
    terms = search.SearchTerms.of("", r"(a|aa)+$", "", None)
    with pytest.raises(RequestError, match="took longer"):
        terms.hits([a_turn("a" * 60 + "b")])


def test_many_short_texts_take_no_longer_than_one_long_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = itertools.count(0.0, 0.3)  # each look at the clock is 0.3 s later than the one before
    monkeypatch.setattr(search, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    terms = search.SearchTerms.of("", "a+", "", None)
    within = int(search.REGEX_S / 0.3)
    assert len(terms.hits([a_turn("a")] * within)) == within
    with pytest.raises(RequestError, match="took longer"):
        terms.hits([a_turn("a")] * (within + 2))


def test_what_is_shown_of_a_match_is_bounded() -> None:
    terms = search.SearchTerms.of("", "x+", "", None)
    (hit,) = terms.hits([a_turn("before " * 100 + "x" * 1_000_000 + " after" * 100)])
    (match,) = hit["matches"]
    assert len(match["match"]) == search.MATCH_CHARS
    assert len(match["before"]) == len(match["after"]) == search.CONTEXT_CHARS


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ({}, "give text, regex, tool, cause or edits_tests"),
        ({"text": "a", "regex": "b"}, "not both"),
        ({"regex": "("}, "regex: "),
        ({"text": "a" * 501}, "500 characters"),
        ({"cause": "x"}, "is not one of"),
        ({"text": "a", "before": "x"}, "before"),
    ],
)
async def test_search_that_cannot_be_made_is_refused_with_a_reason(
    reader: Reader, query: dict[str, str], said: str
) -> None:
    status, body = await reader.ask("search", **query)
    assert status == 400
    assert said in body["error"]["message"]


async def test_expression_whose_flags_exclude_each_other_is_refused(reader: Reader) -> None:
    status, _ = await reader.ask("search", regex="(?V1)a")
    assert status == 400
