"""200 secrets in ten sessions of a real proxy: none in an answer of the page, in an export, or in a
trained token. They stand in prompts, in results of tools, in answers that are streamed token by
token, and in the arguments of calls; each stands again alone, where no detector would find it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
import pytest
from msgspec.structs import replace

from proxy.cli import main
from proxy.client import SessionHandle
from proxy.extras.export.private import without_secrets
from proxy.extras.export.registry import FORMATS, open_format
from proxy.extras.export.selection import ExportSelection, Filters
from proxy.extras.secrets import Known, SessionSecrets, untrained
from proxy.extras.secrets.session import HIDDEN
from proxy.extras.secrets.tokens import pieces
from proxy.records import Reward, Turn
from proxy.store import open_store
from proxy.token_tree.sampled_paths import sampled_paths
from tests.proxy.conftest import ADMIN_KEY, RunningProxy
from tests.proxy.extras.secrets.planted import Planted, planted
from tests.proxy.extras.view.recording import TOOL, user

SECRETS, SESSIONS = 200, 10
Message = dict[str, Any]


async def streamed(proxy: RunningProxy, session: SessionHandle, messages: list[Message]) -> Message:
    """The assistant's message, of the deltas of a streamed call."""
    body = {"model": "m", "messages": messages, "tools": [TOOL], "stream": True}
    text, calls = "", dict[int, dict[str, str]]()
    for event in await proxy.events(session, "chat/completions", body):
        data = event.removeprefix(b"data: ")
        if not data.startswith(b"{"):
            continue
        for choice in orjson.loads(data)["choices"]:
            delta = choice["delta"]
            text += delta.get("content") or ""
            for call in delta.get("tool_calls", ()):
                made = calls.setdefault(call["index"], {"id": "", "name": "", "arguments": ""})
                made["id"] += call.get("id") or ""
                for name in ("name", "arguments"):
                    made[name] += call["function"].get(name) or ""
    named = [
        {"id": c["id"], "type": "function", "function": {k: c[k] for k in ("name", "arguments")}}
        for c in calls.values()
    ]
    return {"role": "assistant", "content": text} | ({"tool_calls": named} if named else {})


def call_of(command: str) -> str:
    call = json.dumps({"name": "shell", "arguments": {"command": command}})
    return f"<tool_call>\n{call}\n</tool_call>"


async def work(proxy: RunningProxy, secrets: list[Planted]) -> SessionHandle:
    """A session in which each secret stands in one of four places, and then again by itself."""
    metadata = {"task_id": "t", "environment": {"LAST": secrets[-1].text}}
    session = await proxy.session(metadata=metadata)
    messages: list[Message] = [{"role": "system", "content": "You are an engineer."}]

    async def turn(*new: Message, answer: str) -> None:
        messages.extend(new)
        proxy.answers(answer)
        messages.append(await streamed(proxy, session, messages))

    def result(text: str) -> Message:
        (call,) = messages[-1]["tool_calls"]
        return {"role": "tool", "tool_call_id": call["id"], "content": text}

    for at, each in enumerate(secrets):
        if at % 4 == 0:
            await turn(user(f"Look at this:\n{each.text}\n"), answer="I see it.")
        elif at % 4 == 1:
            await turn(user("What is there?"), answer=call_of("cat it"))
            await turn(result(f"{each.text}\n"), answer="That is all.")
        elif at % 4 == 2:
            await turn(user("Write it down."), answer=f"It is this:\n{each.text}\nI wrote it down.")
        else:
            await turn(user("Do it."), answer=call_of(f"run it {each.text}"))
            await turn(result("ok"), answer="Done.")
    alone = " then ".join(each.secret for each in secrets)
    await turn(user(f"Once more: {alone} was it."), answer=f"Yes: {alone} was it.")
    messages[1] = user("Something else.")  # a fork, which the page compares
    await turn(user("Again."), answer=f"Again: {secrets[0].secret} was it.")
    await proxy.control.add_reward(session.trial_id, Reward("verifier", 1.0))
    await proxy.control.curate(session.trial_id, value=1.0, comment=f"It leaks {secrets[1].text}")
    return session


@pytest.fixture
async def sessions(proxy: RunningProxy) -> list[tuple[SessionHandle, list[Planted]]]:
    made = planted(42, SECRETS)
    chunks = [made[at::SESSIONS] for at in range(SESSIONS)]
    return [(await work(proxy, chunk), chunk) for chunk in chunks]


def readable(value: Any, decode: Callable[[list[int]], str]) -> Iterator[str]:
    """Everything that somebody who has a JSON value can read in it: strings, texts that are split
    into pieces, JSON within strings, and the text of lists of token ids."""
    if isinstance(value, str):
        yield value
        if value[:1] in ("{", "["):
            with suppress(ValueError):
                yield from readable(json.loads(value), decode)
    elif isinstance(value, dict):
        for name, each in value.items():
            yield name
            yield from readable(each, decode)
    elif isinstance(value, list):
        if value and all(type(each) is int for each in value):
            yield decode([each for each in value if 0 <= each < 2**31])
        elif value and all(isinstance(each, str) for each in value):
            yield "".join(value)
        for each in value:
            yield from readable(each, decode)


def seen(texts: Iterator[str] | list[str], secrets: list[Planted]) -> list[str]:
    whole = "\0".join(texts)
    return [
        f"{each.kind}: {part}"
        for each in secrets
        for part in each.parts
        if part in whole or json.dumps(part)[1:-1] in whole
    ]


async def page_of(
    http: aiohttp.ClientSession, url: str, trial_id: str, form: str, *, texts: bool
) -> list[Any]:
    """All that the page says of a session; with `texts`, each text by itself, too."""
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}

    async def get(path: str, **query: Any) -> Any:
        async with http.get(f"{url}/view/{path}", params=query, headers=headers) as response:
            body = await response.read()
            assert response.status in (200, 409), (path, query, body)
            return (
                [orjson.loads(line) for line in body.splitlines()]
                if "export" in path
                else (orjson.loads(body))
            )

    named = {"session": trial_id}
    found = [await get("session", **named), await get("heads", **named)]
    turns = [head["index"] for head in found[1]["turns"]]
    for at in range(0, len(turns), 20):
        asked = ",".join(map(str, turns[at : at + 20]))
        page = await get("turns", **named, turns=asked)
        found.append(page)
        for turn in page["turns"] if texts else ():
            places = ["tools", "answer.text", "answer.calls.0"]
            for number, message in enumerate(turn["messages"]):
                places += [f"{number}.text"]
                places += [f"{number}.calls.{n}" for n in range(len(message["tool_calls"]))]
            for place in places:
                url_of = {**named, "turn": turn["index"], "place": place}
                async with http.get(f"{url}/view/text", params=url_of, headers=headers) as response:
                    found.append(orjson.loads(await response.read()))
    for turn in turns[-3:]:
        found.append(await get("fork", **named, turn=turn))
        start = 0
        while True:
            page = await get("tokens", **named, turn=turn, start=start, count=4000)
            found.append(page)
            start += len(page["ids"])
            if start >= page["total"]:
                break
    return [*found, await get("session/export", **named, format=form)]


async def test_page_shows_none(
    proxy: RunningProxy, sessions: list[tuple[SessionHandle, list[Planted]]]
) -> None:
    decode = proxy.rendering.tokenizer.decode
    everything = [each for _, secrets in sessions for each in secrets]
    assert len(everything) == SECRETS
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    for path in ("sessions?limit=200", "state", "search?text=was it", "search?regex=.", "forks"):
        async with proxy.http.get(f"{proxy.url}/view/{path}", headers=headers) as response:
            body = orjson.loads(await response.read())
        assert response.status == 200, body
        assert seen(list(readable(body, decode)), everything) == [], path
    formats = [name for name in FORMATS if name != "dpo"]
    for at, (session, secrets) in enumerate(sessions):
        named, form = session.trial_id, formats[at % len(formats)]
        for body in await page_of(proxy.http, proxy.url, named, form, texts=at < 3):
            assert seen(list(readable(body, decode)), secrets) == [], str(body)[:300]
    # What is happening: the last events of the store, with the ratings.
    async with proxy.http.get(f"{proxy.url}/view/live", headers=headers) as response:
        first = await response.content.readuntil(b"\n\n")
    assert b"rating" in first
    assert seen([first.decode()], everything) == []


async def test_record_is_as_it_was_for_its_owner(
    proxy: RunningProxy, sessions: list[tuple[SessionHandle, list[Planted]]]
) -> None:
    session, secrets = sessions[0]
    _, turns = await proxy.record(session)
    texts = [bytes(part).decode() for turn in turns for part in (turn.request, turn.answer)]
    assert len(seen(texts, secrets)) >= len(secrets)


async def test_no_export_has_one(
    proxy: RunningProxy,
    sessions: list[tuple[SessionHandle, list[Planted]]],
    tmp_path: Path,
    checkpoint: Path,
) -> None:
    decode = proxy.rendering.tokenizer.decode
    everything = [each for _, secrets in sessions for each in secrets]
    opened = await open_store(f"sqlite:///{tmp_path}/proxy.db", create=False)
    forms = {name: open_format(name) for name in FORMATS if name != "dpo"}
    selection = ExportSelection(opened, Filters(), forms["tokens"])
    units = without_secrets(selection.units(), forms["tokens"], decode, selection.left_out)
    async for unit in units:
        for name, form in forms.items():
            rows = orjson.loads(orjson.dumps(list(form.rows(unit))))
            assert rows
            assert seen(list(readable(rows, decode)), everything) == [], name
    await opened.close()
    store = ["--store", f"sqlite:///{tmp_path}/proxy.db"]
    out = tmp_path / "tokens.jsonl"
    made = ["export", *store, "--model", str(checkpoint), "--out", str(out)]
    assert await asyncio.to_thread(main, made) == 0
    rows = [orjson.loads(line) for line in out.read_bytes().splitlines()]
    assert len(rows) >= SESSIONS
    assert seen(list(readable(rows, decode)), everything) == []
    out = tmp_path / "records"
    made = ["export", *store, "--model", str(checkpoint), "--format", "records", "--out", str(out)]
    assert await asyncio.to_thread(main, made) == 0
    assert len(list(out.iterdir())) == SESSIONS
    whole = [each.read_bytes().decode(errors="replace") for each in out.iterdir()]
    assert seen(whole, everything) == []
    # Without a tokenizer nobody knows which ids spell a secret.
    out = tmp_path / "unread.jsonl"
    assert await asyncio.to_thread(main, ["export", *store, "--out", str(out)]) == 0
    assert out.read_bytes() == b""
    # As it is, for who asks for it.
    made = ["export", *store, "--format", "messages", "--with-secrets", "--out", str(out)]
    assert await asyncio.to_thread(main, made) == 0
    assert len(seen([out.read_text()], everything)) >= SECRETS


def spelled(ids: list[int], decode: Callable[[list[int]], str], secrets: list[Planted]) -> Any:
    """`[T]`: the tokens that spell a planted secret, as they are or as JSON writes them."""
    texts = pieces(ids, decode)
    whole, ends = "".join(texts), np.cumsum([len(text) for text in texts])
    starts = ends - np.array([len(text) for text in texts])
    found = np.zeros(len(ids), np.bool_)
    for part in {form for s in secrets for p in s.parts for form in (p, json.dumps(p)[1:-1])}:
        at = whole.find(part)
        while at >= 0:
            found |= (starts < at + len(part)) & (ends > at)
            at = whole.find(part, at + 1)
    return found


async def test_no_trained_token_spells_one(
    proxy: RunningProxy, sessions: list[tuple[SessionHandle, list[Planted]]]
) -> None:
    decode = proxy.rendering.tokenizer.decode
    trained = 0
    for session, secrets in sessions:
        _, turns = await proxy.record(session)
        remembered = SessionSecrets(decode)
        remembered.add(turns)
        for path in sampled_paths(turns):
            bad = spelled(path.ids.tolist(), decode, secrets)
            assert (bad & path.sampled).any() or path.turns[-1] != turns[-2].index
            left = path.without(remembered.along(path.turns)).sampled
            assert not (left & bad).any()
            trained += int(left.sum())
            said = untrained(path.ids.tolist(), decode, remembered.known)
            assert not (path.sampled & ~said & bad).any()
    assert trained > 1000  # what is not a secret is trained


def test_secret_that_begins_in_one_turn_and_ends_in_the_next_is_not_trained(
    proxy_free_turns: list[Turn], letters: Callable[[list[int]], str]
) -> None:
    secrets = SessionSecrets(letters)
    secrets.add(proxy_free_turns)
    first, second = (secrets.of(turn.index) for turn in proxy_free_turns)
    text = letters(np.concatenate([t.sampled_ids for t in proxy_free_turns]).tolist())
    assert "ghp_" in text
    assert first[-10:].all()
    assert second[len(proxy_free_turns[1].prompt_ids) :][:30].all()
    assert not first[:10].any()


@pytest.fixture
def letters() -> Callable[[list[int]], str]:
    return lambda ids: "".join(map(chr, ids))


@pytest.fixture
def proxy_free_turns() -> list[Turn]:
    """An answer that was cut within a token of GitHub's, and its continuation."""
    token = "ghp_" + "a1B2c3D4e5" * 3 + "f6G7h8"
    texts = ["I found the token " + token[:10], token[10:] + " there."]
    turns: list[Turn] = []
    shared = 0
    for index, text in enumerate(texts):
        ids = np.array([ord(char) for char in text], np.int32)
        prompt = np.array([ord(char) for char in ("" if index else "Hi. ")], np.int32)
        turns.append(
            Turn(
                session_id="s",
                index=index,
                parent=index - 1 if index else None,
                shared_tokens=shared,
                fork_cause=None,
                prompt_ids=prompt,
                request_key=b"",
                sampling={},
                sampled_ids=ids,
                logprobs=np.zeros(len(ids), np.float32),
            )
        )
        shared = turns[-1].path_tokens
    return turns


def test_what_is_remembered_is_masked_in_every_form() -> None:
    known = Known()
    known.add("x7'\"kPq<2é", "password")
    for text in (
        "it is x7'\"kPq<2é.",
        json.dumps({"a": "x7'\"kPq<2é"}),
        json.dumps({"a": json.dumps(["x7'\"kPq<2é"])}, ensure_ascii=False),
        "x7%27%22kPq%3C2%C3%A9",
    ):
        assert "kPq" not in known.mask(text), known.mask(text)


def test_tokens_of_an_image_beside_a_secret_stay(
    proxy_free_turns: list[Turn], letters: Callable[[list[int]], str]
) -> None:
    image = np.array([-77, -5], np.int32)
    first = replace(
        proxy_free_turns[0],
        prompt_ids=np.concatenate([proxy_free_turns[0].prompt_ids, image]),
    )
    second = replace(proxy_free_turns[1], shared_tokens=first.path_tokens)
    for decode in (letters, None):
        secrets = SessionSecrets(decode)
        secrets.known.add("ghp_anything", "token")
        secrets.add([first, second])
        masked = secrets.masked(first)
        assert masked.prompt_ids[-2:].tolist() == image.tolist()
        assert masked.sampled_ids[-10:].tolist() == [HIDDEN] * 10
    assert untrained([*image.tolist(), *map(ord, "password: x7kPq2zz")], letters)[2:].sum() == 8
