"""What a request may cost: long prefills and long arguments are bounded, and leave the loop."""

from __future__ import annotations

import asyncio
import gzip
import threading
from typing import Any

import orjson
import pytest
from aiohttp import web

from proxy.conversation.json_values import (
    MAX_ARGUMENT_CHARS,
    MAX_ARGUMENT_VALUES,
    canonical_arguments,
    parsed_arguments,
)
from proxy.http.server import read_in_time
from proxy.rendering.rendering import Rendering
from proxy.rendering.tokenizer import Tokenizer
from proxy.serving import endpoints
from proxy.serving.incoming import MAX_PREFILL_CHARS, THREADED_PREFILL_CHARS
from proxy.serving.prompt_bounds import max_chars
from tests.proxy.conftest import RunningProxy, StartProxy


def body(prefill: str) -> dict[str, Any]:
    said = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": prefill}]
    return {"messages": said, "max_tokens": 5}


async def test_a_prefill_beyond_the_bound_is_refused_by_name(proxy: RunningProxy) -> None:
    session = await proxy.session()
    status, answer = await proxy.post(session, "messages", body("a" * (MAX_PREFILL_CHARS + 1)))
    assert status == 413
    assert str(MAX_PREFILL_CHARS) in answer["error"]["message"]


@pytest.mark.parametrize("route", ["messages", "messages/count_tokens"])
async def test_a_long_prefill_is_tokenised_outside_the_event_loop(
    proxy: RunningProxy, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_loop: list[bool] = []
    original = Rendering.prefill

    def watched(rendering: Rendering, text: str) -> Any:
        in_loop.append(threading.current_thread() is threading.main_thread())
        return original(rendering, text)

    monkeypatch.setattr(Rendering, "prefill", watched)
    session = await proxy.session()
    await proxy.post(session, route, body("word " * THREADED_PREFILL_CHARS))
    assert in_loop == [False]


@pytest.mark.parametrize(
    ("route", "field"),
    [
        ("messages", "system"),
        ("messages/count_tokens", "system"),
        ("chat/completions", "arguments"),
        ("chat/completions", "description"),
        ("completions", "prompt"),
    ],
)
async def test_overlong_text_anywhere_is_refused_before_it_is_tokenised(
    start_proxy: StartProxy, monkeypatch: pytest.MonkeyPatch, route: str, field: str
) -> None:
    proxy = await start_proxy(max_context_tokens=1000)
    text = "List the files. " * (max_chars(1000) // 16 + 1)
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 5}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
    if field == "system":
        asked["system"] = text
    elif field == "arguments":
        asked["messages"].append({"role": "assistant", "tool_calls": [call]})
    elif field == "description":
        asked["tools"] = [{"type": "function", "function": {"name": "f", "description": text}}]
    else:
        asked = {"prompt": text}
    encoded: list[int] = []
    original = Tokenizer.encode

    def watched(tokenizer: Tokenizer, text: str, *args: Any, **more: Any) -> Any:
        encoded.append(len(text))
        return original(tokenizer, text, *args, **more)

    monkeypatch.setattr(Tokenizer, "encode", watched)
    status, answer = await proxy.post(await proxy.session(), route, asked)
    assert status == 400
    assert "context" in orjson.dumps(answer).decode() or "too long" in answer["error"]["message"]
    assert max(encoded, default=0) < len(text)


def test_very_long_arguments_are_text_and_are_equal_to_themselves_only() -> None:
    long = orjson.dumps({"a": "1" * MAX_ARGUMENT_CHARS, "n": 1.0}).decode()
    assert parsed_arguments(long) == long
    assert canonical_arguments(long) == canonical_arguments(long)
    assert canonical_arguments(long) != canonical_arguments(long.replace("1.0", "1"))


def test_arguments_with_very_many_values_are_text_and_are_equal_to_themselves_only() -> None:
    few = orjson.dumps({"a": [1] * (MAX_ARGUMENT_VALUES // 2)}).decode()
    many = orjson.dumps({"a": [1] * (MAX_ARGUMENT_VALUES + 1)}).decode()
    assert parsed_arguments(few) == orjson.loads(few)
    assert parsed_arguments(many) == many
    assert canonical_arguments(many) == canonical_arguments(many)
    assert canonical_arguments(many) != canonical_arguments(many.replace("1]", "2]"))


async def test_calls_beyond_the_limit_of_the_process_get_429_until_one_has_ended(
    start_proxy: StartProxy,
) -> None:
    proxy = await start_proxy(limits={"in_flight_calls": 1})
    session = await proxy.session()
    proxy.engine.token_delay_s = 0.05
    hello = body_of("Hi.")
    first = asyncio.create_task(proxy.post(session, "chat/completions", hello))
    await proxy.engine.called.wait()
    status, reply = await proxy.post(session, "chat/completions", hello)
    assert status == 429
    assert "limits.in_flight_calls is 1" in reply["error"]["message"]
    assert (await first)[0] == 200
    assert (await proxy.post(session, "chat/completions", hello))[0] == 200


async def test_bodies_beyond_the_limit_of_the_process_get_429_until_one_is_freed(
    start_proxy: StartProxy,
) -> None:
    proxy = await start_proxy(limits={"in_flight_body_bytes": 100_000})
    session = await proxy.session()
    large = orjson.dumps(body_of("Hi.")) + b" " * 60_000
    proxy.engine.token_delay_s = 0.05
    first = asyncio.create_task(proxy.post(session, "chat/completions", large))
    await proxy.engine.called.wait()
    for route in ("chat/completions", "messages/count_tokens"):
        status, reply = await proxy.post(session, route, large)
        assert status == 429
        assert "limits.in_flight_body_bytes of 100000" in reply["error"]["message"]
    assert (await first)[0] == 200
    for body_bytes, status in ((b"{" * 60_000, 400), (b" " * 200_000, 429), (large, 200)):
        assert (await proxy.post(session, "chat/completions", body_bytes))[0] == status


async def test_decompressed_bytes_count_towards_the_limit_of_the_process(
    start_proxy: StartProxy,
) -> None:
    proxy = await start_proxy(limits={"in_flight_body_bytes": 100_000})
    session = await proxy.session()
    headers = {"Authorization": f"Bearer {session.api_key}", "Content-Encoding": "gzip"}
    for size, status in ((200_000, 429), (60_000, 200), (60_000, 200)):
        data = gzip.compress(orjson.dumps(body_of("Hi.")) + b" " * size)
        async with proxy.http.post(
            f"{session.base_url}/chat/completions", data=data, headers=headers
        ) as response:
            assert response.status == status, await response.text()


async def test_answer_must_be_read_within_the_configured_time(
    start_proxy: StartProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`test_server.py` tests what happens to a client that does not read its answer."""
    limits_s: list[float] = []

    def watched(request: web.Request, limit_s: float, sent_bytes: int) -> Any:
        limits_s.append(limit_s)
        return read_in_time(request, limit_s, sent_bytes)

    monkeypatch.setattr(endpoints, "read_in_time", watched)
    proxy = await start_proxy(limits={"unread_s": 7.0})
    session = await proxy.session()
    assert (await proxy.post(session, "chat/completions", body_of("Hi.")))[0] == 200
    assert limits_s
    assert set(limits_s) == {7.0}


def body_of(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}
