"""The page's requests: who may read, what is sent, and that it is bounded."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from msgspec.structs import replace
from pydantic import SecretStr

from proxy.admin_key import AdminKeys
from proxy.config import ListenConfig
from proxy.conversation.messages import Message, dump_answer
from proxy.errors import ConfigurationError
from proxy.extras.view.access import ADMIN_NAME, LINK_S, Access, _digest, new_key, new_link
from proxy.extras.view.api import ROUTES
from proxy.extras.view.bounded import PIECE_CHARS, SHOWN_CHARS, text_of, turn_json
from proxy.extras.view.fork import difference
from proxy.extras.view.turn_tokens import pieces, turn_tokens
from proxy.http.route import Who
from proxy.records import ALTERNATIVE, Origin, Turn, TurnStatus
from proxy.rendering.rendering import Rendering
from proxy.store import open_store
from proxy.store.browser import Grant, GrantKind
from tests.proxy.conftest import ADMIN_KEY, RunningProxy, StartProxy
from tests.proxy.extras.view.recording import record, user, work
from tests.proxy.store.test_conformance import an_intent, answered

READS = [each.path for each in ROUTES if each.method == "GET" and each.who is not Who.ANYONE]


class Reader:
    """A program that reads the page's data with the admin key."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url

    async def get(self, path: str, **query: Any) -> Any:
        status, body = await self.ask(path, **query)
        assert status == 200, body
        return body

    async def ask(self, path: str, **query: Any) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        url = f"{self._url}/view/{path}"
        async with self._http.get(url, params=query, headers=headers) as response:
            return response.status, orjson.loads(await response.read())


@pytest.fixture
def reader(proxy: RunningProxy) -> Reader:
    return Reader(proxy.http, proxy.url)


@pytest.fixture
async def visitor(proxy: RunningProxy) -> AsyncIterator[aiohttp.ClientSession]:
    """A browser without a cookie."""
    jar = aiohttp.CookieJar(unsafe=True)  # of addresses, too
    async with aiohttp.ClientSession(proxy.url, cookie_jar=jar) as http:
        yield http


async def log_in(visitor: aiohttp.ClientSession, secret: str) -> int:
    async with visitor.post("/view/log_in", json={"secret": secret}) as response:
        return response.status


async def reads(visitor: aiohttp.ClientSession) -> bool:
    async with visitor.get("/view/sessions") as response:
        assert response.status in (200, 401)
        return response.status == 200


@pytest.mark.parametrize("path", READS)
async def test_nothing_is_read_without_a_key(visitor: aiohttp.ClientSession, path: str) -> None:
    async with visitor.get(path) as response:
        assert response.status == 401
        assert "the link that `serve` printed" in await response.text()


async def test_admin_key_becomes_a_cookie_that_scripts_and_other_sites_do_not_get(
    proxy: RunningProxy, visitor: aiohttp.ClientSession
) -> None:
    assert not await reads(visitor)
    async with visitor.post("/view/log_in", json={"secret": ADMIN_KEY}) as response:
        (cookie,) = response.headers.getall("Set-Cookie")
    port = proxy.url.rpartition(":")[2]
    assert cookie.startswith(f"agentic_view_{port}=")
    assert ADMIN_KEY not in cookie
    for part in ("HttpOnly", "SameSite=Strict", "Path=/view"):
        assert part in cookie
    assert await reads(visitor)
    async with visitor.post("/view/log_out", json={}) as response:
        assert response.status == 200
    assert not await reads(visitor)


@pytest.mark.parametrize("secret", ["", "wrong", ADMIN_KEY[:-1], ADMIN_KEY + "x", "ü"])
async def test_wrong_secret_is_refused(visitor: aiohttp.ClientSession, secret: str) -> None:
    assert await log_in(visitor, secret) == 401


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"secret": 1}', b'{"secret": null}'])
async def test_log_in_without_a_secret_is_refused(
    visitor: aiohttp.ClientSession, body: bytes
) -> None:
    headers = {"Content-Type": "application/json"}
    async with visitor.post("/view/log_in", data=body, headers=headers) as response:
        assert response.status in (400, 401)


async def test_link_opens_once_and_a_revoked_key_closes_its_browsers(
    start_proxy: StartProxy, tmp_path: Any
) -> None:
    store = await open_store(f"sqlite:///{tmp_path}/grants.db")
    proxy = await start_proxy(store=store)
    jars = [aiohttp.CookieJar(unsafe=True) for _ in range(3)]
    link, key = await new_link(store.browser), await new_key(store.browser, "ana")
    with pytest.raises(ConfigurationError, match="a key 'ana' exists"):
        await new_key(store.browser, "ana")
    async with (
        aiohttp.ClientSession(proxy.url, cookie_jar=jars[0]) as one,
        aiohttp.ClientSession(proxy.url, cookie_jar=jars[1]) as two,
        aiohttp.ClientSession(proxy.url, cookie_jar=jars[2]) as three,
    ):
        assert await log_in(one, link) == 200
        assert await log_in(two, link) == 401
        assert await log_in(two, key) == 200
        assert await log_in(three, key) == 200
        cookie = next(iter(jars[1])).value
        assert await log_in(three, cookie) == 401  # a cookie is not a key
        assert [await reads(each) for each in (one, two, three)] == [True] * 3
        assert await store.browser.revoke_grants("ana") == 3
        assert [await reads(each) for each in (one, two, three)] == [True, False, False]
        assert await log_in(two, key) == 401
    await store.close()


async def test_only_the_administrator_and_a_link_that_edits_change_sessions(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    store = await open_store(f"sqlite:///{tmp_path}/edits.db")
    proxy = await start_proxy(store=store)
    session = await proxy.session(trial_id="a/b")
    await work(proxy, session, "Fix the test.", turns=1)
    reads_only, edits = [await new_link(store.browser, edits=each) for each in (False, True)]
    jars = [aiohttp.CookieJar(unsafe=True) for _ in range(2)]
    async with (
        aiohttp.ClientSession(proxy.url, cookie_jar=jars[0]) as guest,
        aiohttp.ClientSession(proxy.url, cookie_jar=jars[1]) as owner,
    ):
        for visitor, link, expected in ((guest, reads_only, 403), (owner, edits, 200)):
            assert await log_in(visitor, link) == 200
            said = {"value": 1, "comment": "Good.", "tags": {"topic": "tests"}}
            url = "/view/session/curation?session=a/b"
            assert await _status(visitor.post(url, json=said)) == expected
            async with visitor.get("/view/state") as response:
                assert (await response.json())["may_edit"] == (expected == 200)
        for wrong in ({"value": "x"}, {"tags": {"": "x"}}, {"comment": "x" * 5000}, {"odd": 1}):
            url = "/view/session/curation?session=a/b"
            assert await _status(owner.post(url, json=wrong)) == 400
        async with owner.get("/view/session?session=a/b") as response:
            shown = await response.json()
        assert shown["asked"] == "Fix the test."
        assert shown["rating"] == {"value": 1.0, "comment": "Good."}
        assert shown["metadata"]["topic"] == "tests"
        async with guest.get("/view/session/export?session=a/b&format=messages") as response:
            assert response.status == 200
            (row,) = [orjson.loads(line) for line in (await response.read()).splitlines()]
            told = response.headers["Content-Disposition"]
        assert row["messages"][1]["content"] == "Fix the test."
        assert told == "attachment; filename*=UTF-8''a-b.messages.jsonl"
        for query, expected in (("a/b&format=parquet", 400), ("none&format=messages", 404)):
            assert await _status(guest.get(f"/view/session/export?session={query}")) == expected
        proxy.engine.token_delay_s = 600
        proxy.engine.called.clear()
        hello = {"messages": [{"role": "user", "content": "Hi."}]}
        calling = asyncio.create_task(proxy.post(session, "chat/completions", hello))
        await proxy.engine.called.wait()
        gone = "/view/session?session=a/b"
        assert [await _status(each.delete(gone)) for each in (guest, owner)] == [403, 409]
        await proxy.control.complete("a/b")
        await calling
        assert [await _status(owner.delete(gone)) for _ in range(2)] == [200, 404]
    assert await store.get_session("a/b") is None
    await store.close()


async def _status(asked: Any) -> int:
    async with asked as response:
        return int(response.status)


async def test_first_words_are_found_behind_an_agents_own_calls(
    proxy: RunningProxy, reader: Reader
) -> None:
    session = await proxy.session(trial_id="title")
    system = {"role": "system", "content": "Write a title."}
    await proxy.post(session, "chat/completions", {"messages": [system]})
    assert (await reader.get("session", session="title"))["asked"] == ""
    await proxy.post(session, "chat/completions", {"messages": [system, user("Mend it.")]})
    (row,) = (await reader.get("sessions"))["sessions"]
    assert row["asked"] == "Mend it."
    tools = [{"type": "function", "function": {"name": "run"}}]
    said = [user("I am an agent."), {"role": "assistant", "content": "Well."}, user("Paint it.")]
    await proxy.post(session, "chat/completions", {"messages": said, "tools": tools})
    await proxy.post(session, "chat/completions", {"messages": [user("Later.")], "tools": tools})
    (row,) = (await reader.get("sessions"))["sessions"]
    assert row["asked"] == "Paint it."


async def test_removed_admin_key_closes_the_browsers_that_it_opened_the_page_in(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    keys = tmp_path / "admin-key"
    keys.write_text(f"the-next-key\n{ADMIN_KEY}\n")
    proxy = await start_proxy(admin_key_file=keys)
    jars = [aiohttp.CookieJar(unsafe=True) for _ in range(2)]
    async with (
        aiohttp.ClientSession(proxy.url, cookie_jar=jars[0]) as old,
        aiohttp.ClientSession(proxy.url, cookie_jar=jars[1]) as new,
    ):
        assert await log_in(old, ADMIN_KEY) == 200
        assert await log_in(new, "the-next-key") == 200
        assert [await reads(each) for each in (old, new)] == [True, True]
        keys.write_text("the-next-key\n")
        assert [await reads(each) for each in (old, new)] == [False, True]
        async with new.post("/view/log_out", json={}) as response:
            assert response.status == 200
        jars[1].update_cookies({f"agentic_view_{proxy.url.rpartition(':')[2]}": "gone"})
        assert not await reads(new)


async def test_cookie_of_an_admin_key_ends_when_it_is_logged_out_or_revoked(tmp_path: Path) -> None:
    store = await open_store(f"sqlite:///{tmp_path}/grants.db")
    keys = AdminKeys(ListenConfig(admin_key=SecretStr(ADMIN_KEY)))
    access = Access(lambda: store.browser, keys, secure=False)
    left, revoked, kept = [await access.log_in(ADMIN_KEY) for _ in range(3)]

    def request(cookie: str | None) -> web.Request:
        headers = {"Host": "proxy:8000", "Cookie": f"agentic_view_8000={cookie}"}
        return make_mocked_request("GET", "/view/sessions", headers=headers)

    assert [await access.reader(request(each)) is not None for each in (left, revoked)] == [
        True,
        True,
    ]
    await access.log_out(request(left))
    assert [await access.reader(request(each)) is not None for each in (left, revoked)] == [
        False,
        True,
    ]
    await store.browser.revoke_grants(ADMIN_NAME)
    assert [await access.reader(request(each)) is not None for each in (revoked, kept)] == [
        False,
        False,
    ]
    earlier = Grant(_digest("c"), GrantKind.COOKIE, ADMIN_NAME, 1.0)  # without the admin key's part
    await store.browser.add_grant(earlier)
    assert not await access.reader(request("c"))
    await store.close()


async def test_expired_link_and_unusable_names_are_refused(
    start_proxy: StartProxy, tmp_path: Any
) -> None:
    store = await open_store(f"sqlite:///{tmp_path}/grants.db")
    proxy = await start_proxy(store=store)
    await store.browser.add_grant(Grant(_digest("old"), GrantKind.LINK, "link", 1.0, 1.0 + LINK_S))
    async with aiohttp.ClientSession(proxy.url) as http:
        assert await log_in(http, "old") == 401
    for name in ("", "link", "admin", "a b", "x" * 81):
        with pytest.raises(ConfigurationError, match="cannot be used"):
            await new_key(store.browser, name)
    await store.close()


async def test_page_and_files_need_no_key_and_run_only_our_own_scripts(
    proxy: RunningProxy, visitor: aiohttp.ClientSession
) -> None:
    async with visitor.get("/") as response:
        page = await response.text()
        policy = response.headers["Content-Security-Policy"]
    assert "unsafe" not in policy
    assert {"default-src 'none'", "script-src 'self'"} <= set(policy.split("; "))
    assert "frame-ancestors 'none'" in policy
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert response.headers["Referrer-Policy"] == "no-referrer"
    for name in re.findall(r'(?:src|href)="(/[^"]+)"', page):
        async with visitor.get(name) as response:
            assert response.status == 200, name
            assert response.headers["Content-Security-Policy"] == policy
            etag = response.headers["ETag"]
        async with visitor.get(name, headers={"If-None-Match": etag}) as response:
            assert response.status == 304
    assert "http:" not in page
    assert "https:" not in page
    async with visitor.get("/view/static/../access.py") as response:
        assert response.status == 404


@pytest.mark.parametrize(
    ("path", "mode", "target", "expected"),
    [
        ("/", "navigate", "document", 200),
        ("/", "navigate", "iframe", 403),
        ("/", "no-cors", "image", 403),
        ("/", "cors", "empty", 403),
        ("/view/state", "navigate", "document", 403),
        ("/view/static/app.js", "no-cors", "script", 403),
        ("/sessions", "navigate", "document", 403),
    ],
)
async def test_other_sites_may_only_link_to_the_page(
    visitor: aiohttp.ClientSession, path: str, mode: str, target: str, expected: int
) -> None:
    headers = {"Sec-Fetch-Mode": mode, "Sec-Fetch-Dest": target, "Sec-Fetch-Site": "cross-site"}
    async with visitor.get(path, headers=headers) as response:
        assert response.status == expected
    async with visitor.get("/", headers={**headers, "Host": "evil.test"}) as response:
        assert response.status == 403


async def test_a_recorded_session_is_shown_with_its_forks(
    proxy: RunningProxy, reader: Reader
) -> None:
    session = await record(proxy)
    shown = await reader.get("session", session=session.trial_id)
    assert (shown["turns"], shown["reward"]) == (9, 1.0)
    (listed,) = (await reader.get("sessions"))["sessions"]
    assert listed == shown
    heads = (await reader.get("heads", session=session.trial_id))["turns"]
    causes = [head["fork"] for head in heads]
    assert causes[:4] == [None] * 4
    assert causes[4:] == [
        "tool_arguments",
        "new_conversation",
        "compaction",
        "sibling",
        "sibling",
    ]
    turns = (await reader.get("turns", session=session.trial_id, turns="0,3"))["turns"]
    assert [turn["index"] for turn in turns] == [0, 3]
    assert [message["role"] for message in turns[0]["messages"]] == ["system", "user"]
    assert turns[0]["tools"] == ["shell"]
    assert turns[0]["answer"]["tool_calls"][0]["name"] == "shell"
    every = await reader.get("forks", limit=2)
    rest = await reader.get("forks", before=every["next"])
    causes = [fork["fork"] for fork in every["turns"] + rest["turns"]]
    assert len({*causes}) > 2
    assert len(rest["turns"]) > 0
    began = [fork["started_at"] for fork in every["turns"] + rest["turns"]]
    assert began == sorted(began, reverse=True)
    forks = await reader.get("forks", cause="compaction")
    assert [(fork["session"], fork["index"]) for fork in forks["turns"]] == [(session.trial_id, 6)]


async def test_fork_shows_what_was_sent_against_what_was_recorded(
    proxy: RunningProxy, reader: Reader
) -> None:
    session = await record(proxy)
    fork = await reader.get("fork", session=session.trial_id, turn=4)
    assert (fork["against"], fork["common"]) == (3, 4)
    (change,) = fork["changes"]
    assert change["field"] == "tool call 1"
    changed = [part for part in change["parts"] if part[0] in "-+"]
    assert changed == [["+", " | head -50"]]
    tokens = fork["tokens"]
    assert tokens["shared"] > 0
    _, turns = await proxy.record(session)
    assert tokens["sent"]["ids"] == turns[4].prompt_ids[:32].tolist()


async def test_changed_tools_are_shown(proxy: RunningProxy, reader: Reader) -> None:
    session = await proxy.session()
    await work(proxy, session, "Hello.", turns=1)
    body = {"model": "m", "messages": [user("Hello.")]}
    await proxy.post(session, "chat/completions", body)
    fork = await reader.get("fork", session=session.trial_id, turn=1)
    assert "tools" in [change["field"] for change in fork["changes"]]


async def test_tokens_are_those_of_the_record_and_their_texts_join_to_the_prompt(
    proxy: RunningProxy, reader: Reader
) -> None:
    session = await proxy.session()
    await work(proxy, session, "Été naïve 数学, \U0001f600 done.", turns=2)
    _, turns = await proxy.record(session)
    found = await reader.get("tokens", session=session.trial_id, turn=1, start=0, count=4000)
    last = turns[1]
    assert found["total"] == last.path_tokens
    assert found["prompt_tokens"] == last.prompt_tokens
    decode = proxy.rendering.tokenizer.decode
    assert "".join(found["texts"]) == decode(found["ids"])
    assert found["ids"][last.prompt_tokens :] == last.sampled_ids.tolist()
    sampled = found["logprobs"][last.prompt_tokens :]
    assert sampled == pytest.approx(last.logprobs.tolist(), abs=1e-4)
    assert found["logprobs"][: turns[0].prompt_tokens] == [None] * turns[0].prompt_tokens
    middle = await reader.get("tokens", session=session.trial_id, turn=1, start=7, count=5)
    assert middle["ids"] == found["ids"][7:12]
    assert middle["texts"] == found["texts"][7:12]


async def test_tokens_have_their_recorded_alternatives(proxy: RunningProxy, reader: Reader) -> None:
    on, off = await proxy.session(sampling={"alternatives": 3}), await proxy.session()
    for session in (on, off):
        await work(proxy, session, "Hello.", turns=2)
    page = {"turn": 1, "start": 0, "count": 4000}
    assert "alternatives" not in await reader.get("tokens", session=off.trial_id, **page)
    found = await reader.get("tokens", session=on.trial_id, **page)
    _, turns = await proxy.record(on)
    expected: list[list[int]] = [[] for _ in found["ids"]]
    for turn in turns:
        assert turn.alternatives is not None
        expected[turn.prompt_tokens : turn.path_tokens] = turn.alternatives["id"].tolist()
    told = found["alternatives"]
    assert told["ids"] == expected
    last = turns[1]
    assert last.alternatives is not None
    np.testing.assert_allclose(
        told["logprobs"][last.prompt_tokens :], last.alternatives["logprob"], atol=1e-4
    )
    tokenizer = proxy.rendering.tokenizer
    assert set(told["texts"]) == {str(each) for row in expected for each in row}
    assert all(
        text == "".join(pieces([int(token)], tokenizer)) for token, text in told["texts"].items()
    )
    page |= {"start": last.prompt_tokens - 2, "count": 4}
    part = (await reader.get("tokens", session=on.trial_id, **page))["alternatives"]
    assert part["ids"] == expected[page["start"] : page["start"] + 4]
    assert len(part["texts"]) <= 6


def test_alternatives_end_where_a_fork_leaves_the_answer() -> None:
    rows = np.array([[(6, -0.5)], [(-1, -np.inf)]], ALTERNATIVE)
    first = replace(answered(replace(an_intent(), shared_tokens=0)), alternatives=rows)
    fork = replace(answered(an_intent(index=1)), parent=0, shared_tokens=4, alternatives=rows)
    told = turn_tokens([first, fork]).alternatives_page(0, 9, None)
    assert told == {
        "ids": [[], [], [], [6], [], [], [], [6], []],
        "logprobs": [[], [], [], [-0.5], [], [], [], [-0.5], []],
        "texts": None,
    }
    assert turn_tokens([first, fork]).alternatives_page(8, 9, None) is None


def test_characters_of_several_tokens_are_shown_at_the_first(rendering: Rendering) -> None:
    tokenizer = rendering.tokenizer
    for text in ("\U0001f600", "a\U0001f600\U0001f469b", "數", "\ufffd", "x\x80"):
        ids = tokenizer.encode(text)
        assert "".join(pieces(ids, tokenizer)) == text
    broken = tokenizer.encode("\U0001f600")[:2]
    assert len(pieces(broken, tokenizer)) == 2


def test_spans_of_a_path_say_which_tokens_are_trained() -> None:
    first = answered(replace(an_intent(), shared_tokens=0))
    cut = replace(answered(an_intent(index=1)), parent=0, shared_tokens=4, status=TurnStatus.CUT)
    tokens = turn_tokens([first, cut])
    spans = [(s.start, s.end, s.turn, s.sampled, s.trained, s.version) for s in tokens.spans]
    assert spans == [
        (0, 3, 0, False, False, None),
        (3, 4, 0, True, True, 4),
        (4, 7, 1, False, False, None),
        (7, 8, 1, True, False, 4),
        (8, 9, 1, True, False, 5),
    ]
    assert len(tokens.ids) == len(tokens.logprobs) == 9
    assert np.isnan(tokens.logprobs[:3]).all()


def a_turn(text: str) -> Turn:
    message: dict[str, Any] = {"role": "user", "text": text, "reasoning": None, "tool_calls": []}
    request = {"after": None, "tools": [], "messages": [{**message, "tool_call_id": None}]}
    answer = dump_answer(Message("assistant", text))
    return replace(an_intent(), request=orjson.dumps(request), answer=answer)


def test_long_text_is_cut_and_read_in_pieces() -> None:
    text = "ü" * 10_000_000
    turn = a_turn(text)
    shown = turn_json(turn)
    answer = shown["answer"]
    assert answer is not None
    for message in (shown["messages"][0], answer):
        assert message["text"] == {"text": "ü" * SHOWN_CHARS, "chars": len(text)}
    assert len(orjson.dumps(shown)) < 10 * SHOWN_CHARS
    assert text_of(turn, "0.text") == text_of(turn, "answer.text") == text
    for place in ("1.text", "x", "", "answer.calls.0", "answer.calls.x", "-1.text"):
        assert text_of(turn, place) is None


async def test_pieces_of_a_text_join_to_the_whole(proxy: RunningProxy, reader: Reader) -> None:
    session = await proxy.session()
    text = "".join(f"line {n}\n" for n in range(20_000))
    body = {"model": "m", "messages": [user(text)]}
    status, _ = await proxy.post(session, "chat/completions", body)
    if status != 200:  # too long for the model: then it is not recorded
        body["messages"] = [user(text := text[:20_000])]
        status, _ = await proxy.post(session, "chat/completions", body)
    assert status == 200
    joined = ""
    while len(joined) < len(text):
        query = {"session": session.trial_id, "turn": 0, "place": "0.text", "from": len(joined)}
        found = await reader.get("text", **query)
        assert 0 < len(found["text"]) <= PIECE_CHARS
        joined += found["text"]
    assert joined == text


@pytest.mark.parametrize(
    ("recorded", "sent", "expected"),
    [
        ("a b c", "a b c d", [["=", "a b c"], ["+", " d"]]),
        ("one two", "one 2", [["=", "one "], ["-", "two"], ["+", "2"]]),
        ("", "x", [["+", "x"]]),
        ("x", "", [["-", "x"]]),
        ("aa", "a", [["=", "a"], ["-", "a"]]),
    ],
)
def test_difference_of_texts(recorded: str, sent: str, expected: list[list[str]]) -> None:
    assert difference(recorded, sent) == expected


def test_difference_of_huge_texts_is_bounded() -> None:
    parts = difference("x" * 5_000_000 + "ab " * 500_000, "x" * 5_000_000 + "ba " * 500_000)
    assert sum(len(text) for _, text in parts) < 40_000
    assert parts[0] == ["…", "4,999,840 equal characters"]


@pytest.mark.parametrize(
    ("path", "query", "status"),
    [
        ("session", {"session": "none"}, 404),
        ("session", {}, 404),
        ("sessions", {"status": "x"}, 400),
        ("sessions", {"before": "x"}, 400),
        ("sessions", {"limit": "0"}, 400),
        ("sessions", {"limit": "9" * 5000}, 400),
        ("sessions", {"limit": "0" * 19 + "1000000"}, 400),
        ("turns", {"session": "none", "turns": "9" * 20}, 400),
        ("turns", {"session": "none", "turns": "0," + "9" * 5000}, 400),
        ("turns", {"session": "none", "turns": "x"}, 400),
        ("tokens", {"session": "none", "turn": "0"}, 404),
        ("tokens", {"session": "none"}, 400),
        ("tokens", {"session": "none", "turn": "-1"}, 400),
        ("tokens", {"session": "none", "turn": "१"}, 400),
        ("fork", {"session": "none", "turn": "1"}, 404),
        ("forks", {"cause": "x"}, 400),
        ("text", {"session": "none", "turn": "1", "place": "0.text"}, 404),
    ],
)
async def test_wrong_questions_are_refused_with_a_reason(
    reader: Reader, path: str, query: dict[str, str], status: int
) -> None:
    found, body = await reader.ask(path, **query)
    assert found == status
    assert body["error"]["message"]


@pytest.mark.parametrize("place", ["9" * 5000 + ".text", "answer.calls." + "9" * 5000])
async def test_text_at_a_place_of_many_digits_is_not_found(
    proxy: RunningProxy, reader: Reader, place: str
) -> None:
    session = await proxy.session()
    body = {"messages": [{"role": "user", "content": "Hi."}]}
    await proxy.post(session, "chat/completions", body)
    asked = {"session": session.trial_id, "turn": "0", "place": place}
    assert (await reader.ask("text", **asked))[0] == 404


async def test_feed_continues_where_the_reader_was(proxy: RunningProxy) -> None:
    session = await proxy.session()
    messages = await work(proxy, session, "Hello.", turns=1)
    first = await events(proxy, {}, 2)
    assert [head["index"] for head in first[0]["answered"]] == [0]
    assert first[1]["engines"][0]["healthy"]
    await proxy.post(session, "chat/completions", {"model": "m", "messages": messages})
    (news, *_) = await events(proxy, {"Last-Event-ID": first[0]["id"]}, 1)
    assert [head["index"] for head in news["answered"]] == [1]
    assert [head["index"] for head in news["begun"]] == [1]
    (same, *_) = await events(proxy, {}, 1, after=first[0]["id"])
    assert same == news


async def events(
    proxy: RunningProxy, headers: dict[str, str], count: int, **query: str
) -> list[Any]:
    """The first events of a stream; the first one also has its id."""
    headers = {"Authorization": f"Bearer {ADMIN_KEY}", **headers}
    found: list[Any] = []
    position = ""
    async with proxy.http.get(f"{proxy.url}/view/live", headers=headers, params=query) as response:
        async for line in response.content:
            if line.startswith(b"id: "):
                position = line[4:].strip().decode()
            if line.startswith(b"data: "):
                found.append(orjson.loads(line[6:]) | {"id": position})
            if len(found) == count:
                break
    return found


def test_admin_key_is_only_what_is_configured() -> None:
    from proxy.admin_key import AdminKeys

    assert not AdminKeys(ListenConfig()).accepts("")


async def test_an_id_that_is_used_again_shows_nothing_of_the_session_before(
    proxy: RunningProxy, reader: Reader
) -> None:
    said = {"FIRST": "hello", "SECOND": "export DB_PASSWORD=x7!kPq2zz"}
    for answer_, task in said.items():
        session = await proxy.session(trial_id="again")
        proxy.answers(f"{answer_}: I log in with x7!kPq2zz now")
        messages = [{"role": "user", "content": task}]
        assert (await proxy.post(session, "chat/completions", {"messages": messages}))[0] == 200
        await reader.get("sessions")
        turns = orjson.dumps(await reader.get("turns", session="again", turns="0")).decode()
        tokens = orjson.dumps(await reader.get("tokens", session="again", turn="0")).decode()
        found = orjson.dumps(await reader.get("search", text="log in")).decode()
        assert answer_ in turns
        assert answer_ in "".join(orjson.loads(tokens)["texts"])
        if answer_ == "SECOND":
            assert "FIRST" not in turns + tokens
            assert "kPq2" not in turns + found
        await proxy.control.delete("again")


async def test_branch_shows_no_secret_that_the_metadata_of_its_origin_shows_to_be_one(
    proxy: RunningProxy, visitor: aiohttp.ClientSession
) -> None:
    assert await log_in(visitor, ADMIN_KEY) == 200
    metadata = {"db_password": "plum-Tree_77"}
    origin = await proxy.session(trial_id="origin", metadata=metadata)
    await work(proxy, origin, "The word is plum-Tree_77.", turns=2)
    await proxy.control.branch(Origin("origin", 1), "branch")
    await proxy.control.branch(Origin("branch", 1), "twig")
    for name in ("origin", "branch", "twig"):
        for route in ("session", "turns", "heads"):
            query = {"session": name} | ({"turns": "0"} if route == "turns" else {})
            async with visitor.get(f"/view/{route}", params=query) as response:
                assert "plum-Tree" not in await response.text(), (name, route)
