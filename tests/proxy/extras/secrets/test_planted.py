"""200 secrets in ten sessions of a real proxy: none in an answer of the page, in an export, or in a
trained token. They stand in prompts, in results of tools, in answers that are streamed token by
token, and in the arguments of calls; each stands again alone, where no detector would find it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
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
from proxy.records import Reward, Turn
from proxy.records.binary import decode_record
from proxy.store import open_store
from proxy.token_tree.sampled_paths import sampled_paths
from tests.proxy.conftest import ADMIN_KEY, RunningProxy
from tests.proxy.extras.secrets.planted import Planted
from tests.proxy.extras.secrets.planted_sessions import (
    PASSWORD,
    SECRETS,
    SESSIONS,
    branched,
    readable,
    recorded,
    seen,
    spelled,
)


@pytest.fixture
async def sessions(proxy: RunningProxy) -> list[tuple[SessionHandle, list[Planted]]]:
    return await recorded(proxy)


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
    forms = {name: open_format(name) for name in FORMATS}
    pairs = {name: form for name, form in forms.items() if form.unit == "pair"}
    for chosen in (forms.keys() - pairs.keys(), pairs.keys()):
        selection = ExportSelection(opened, Filters(), forms[min(chosen)])
        units = without_secrets(selection.units(), forms[min(chosen)], decode, selection.left_out)
        count = 0
        async for unit in units:
            count += len(unit)
            for name in chosen:
                rows = orjson.loads(orjson.dumps(list(forms[name].rows(unit))))
                assert rows, name
                assert seen(list(readable(rows, decode)), everything) == [], name
        assert count == SESSIONS
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
    for file in out.iterdir():
        record = file.read_bytes()
        assert seen([record.decode(errors="replace")], everything) == []
        session, turns = decode_record(record)
        texts = [part for turn in turns for part in (turn.request, turn.answer) if part]
        values = [dict(session.metadata), *map(orjson.loads, texts)]
        paths = [path.ids.tolist() for path in sampled_paths(turns)]
        assert seen(list(readable([*values, *paths], decode)), everything) == []
    # Without a tokenizer nobody knows which ids spell a secret.
    out = tmp_path / "unread.jsonl"
    assert await asyncio.to_thread(main, ["export", *store, "--out", str(out)]) == 0
    assert out.read_bytes() == b""
    # As it is, for who asks for it.
    made = ["export", *store, "--format", "messages", "--with-secrets", "--out", str(out)]
    assert await asyncio.to_thread(main, made) == 0
    assert len(seen([out.read_text()], everything)) >= SECRETS


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


@pytest.mark.parametrize("form", ["tokens", "messages", "dpo"])
async def test_no_export_of_a_branch_has_what_its_origin_shows_to_be_one(
    proxy: RunningProxy, tmp_path: Path, form: str
) -> None:
    """The password is no secret by its looks; the metadata of the first session names it one."""
    await branched(proxy)
    for name, reward in (("branch", 1.0), ("twig", 0.0)):
        await proxy.control.add_reward(name, Reward("verifier", reward))
    opened = await open_store(f"sqlite:///{tmp_path}/proxy.db", create=False)
    chosen = open_format(form)
    selection = ExportSelection(opened, Filters(ids=("branch", "twig")), chosen)
    decode = proxy.rendering.tokenizer.decode
    masked = without_secrets(selection.units(), chosen, decode, selection.left_out)
    rows = [row async for unit in masked for row in chosen.rows(unit)]
    await opened.close()
    assert rows
    texts = list(readable(orjson.loads(orjson.dumps(rows)), decode))
    assert not [text for text in texts if PASSWORD in text]


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
