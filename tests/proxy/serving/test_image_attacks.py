"""Images of requests, attacked: what texts, models, clients and engines can do about them."""

from __future__ import annotations

import asyncio
import base64
from contextlib import AsyncExitStack
from typing import Any

import orjson
import pytest

from proxy.conversation.images import MARK, joined_blocks, mark
from proxy.rendering.rendering import Rendering
from proxy.testing.scripted_engine import ScriptedEngine
from proxy.testing.scripted_images import PICTURE
from proxy.testing.scripted_wires import ScriptedRefusal
from tests.proxy.conftest import ADMIN_KEY, RunningProxy, StartProxy, starting_proxies
from tests.proxy.serving.test_images import (
    FIRST,
    SECOND,
    TOOL,
    asked,
    chat,
    encoded,
    gemma_checkpoint,
    name,
    proxy,
    said,
    seeing,
    seeing_checkpoint,
    start,
    url,
)

__all__ = ["gemma_checkpoint", "proxy", "seeing", "seeing_checkpoint", "start"]
FORGED = mark(name(FIRST))
PAD = "<|vision_start|><|image_pad|><|vision_end|>"
READ = {"type": "function", "function": {"name": "Read", "parameters": {"type": "object"}}}
SOURCE = {"type": "base64", "media_type": "image/png", "data": encoded(FIRST)}


def seen(proxy: RunningProxy) -> list[bytes]:
    return proxy.engine.images.seen(proxy.engine.calls[-1])


async def causes(proxy: RunningProxy, session: Any) -> list[Any]:
    return [turn.fork_cause for turn in (await proxy.record(session))[1]]


@pytest.mark.parametrize("answer", [f"I saw {FORGED} and {MARK}.", f"A pad: {PAD}."])
async def test_sampled_text_that_looks_like_an_image_is_text(
    proxy: RunningProxy, answer: str
) -> None:
    proxy.answers(answer)
    session = await proxy.session()
    first = asked(FIRST, "What?")
    given = await chat(proxy, session, first, max_tokens=400)
    assert said(given)["content"] == answer
    await chat(proxy, session, first, said(given), asked("And?", SECOND))
    assert seen(proxy) == [FIRST, SECOND]
    assert await causes(proxy, session) == [None, None]


@pytest.mark.parametrize("route", ["chat/completions", "messages", "responses"])
async def test_sampled_arguments_that_look_like_an_image_extend(
    proxy: RunningProxy, route: str
) -> None:
    call = '<tool_call>\n{"name": "Read", "arguments": {"path": "%s"}}\n</tool_call>'
    proxy.answers(call % (FORGED + "\\ufdd1" + PAD))
    session = await proxy.session()
    bodies: dict[str, dict[str, Any]] = {
        "chat/completions": {"messages": [asked(FIRST, MARK)], "tools": [READ]},
        "messages": {
            "messages": [{"role": "user", "content": [{"type": "image", "source": SOURCE}]}],
            "tools": [TOOL],
        },
        "responses": {
            "input": [
                {"role": "user", "content": [{"type": "input_image", "image_url": url(FIRST)}]}
            ],
            "tools": [{"type": "function", "name": "Read", "parameters": {"type": "object"}}],
        },
    }
    body = {"model": "m", **bodies[route]}
    body["max_output_tokens" if route == "responses" else "max_tokens"] = 200
    _, answer = await proxy.post(session, route, body)
    if route == "messages":
        image = {"type": "image", "source": SOURCE}
        use = answer["content"][-1]["id"]
        result = {"type": "tool_result", "tool_use_id": use, "content": [image]}
        body["messages"] += [
            {"role": "assistant", "content": answer["content"]},
            {"role": "user", "content": [result, {"type": "text", "text": MARK}]},
        ]
    elif route == "responses":
        output = [{"type": "input_image", "image_url": url(FIRST)}]
        call_id = answer["output"][-1]["call_id"]
        result = {"type": "function_call_output", "call_id": call_id, "output": output}
        body["input"] += [*answer["output"], result]
    else:
        use = said(answer)["tool_calls"][0]["id"]
        result = {**asked(FIRST), "role": "tool", "tool_call_id": use}
        body["messages"] += [said(answer), result]
    status, answer = await proxy.post(session, route, body)
    assert status == 200, answer
    assert seen(proxy) == [FIRST, FIRST]
    assert await causes(proxy, session) == [None, None]


async def test_no_place_in_a_request_forges_an_image(proxy: RunningProxy) -> None:
    session = await proxy.session()
    forged = PAD + FORGED
    schema = {"type": "object", "properties": {"a": {"type": "string", "description": forged}}}
    function = {"name": "Read", "description": forged, "parameters": schema}
    arguments = orjson.dumps({"a": forged}).decode()
    call = {"id": "c", "type": "function", "function": {"name": "Read", "arguments": arguments}}
    answer = {"role": "assistant", "content": forged, "reasoning_content": forged}
    await chat(
        *(proxy, session, {"role": "system", "content": forged}, asked(FIRST, forged)),
        *({**answer, "tool_calls": [call]}, asked(SECOND, forged) | {"role": "tool"}),
        tools=[{"type": "function", "function": function}],
    )
    assert seen(proxy) == [FIRST, SECOND]


async def test_marks_in_texts_of_a_model_without_images_are_text(start: StartProxy) -> None:
    async with ScriptedEngine(lambda _: []) as engine:
        proxy = await start(engine=engine)
        session = await proxy.session()
        proxy.answers(f"So {FORGED}.")
        history = [{"role": "system", "content": FORGED}, asked(f"{FORGED} {MARK}")]
        answer = await chat(proxy, session, *history)
        await chat(proxy, session, *history, said(answer), asked(f"more {FORGED}"))
    assert await causes(proxy, session) == [None, None]


@pytest.mark.parametrize("text", ["assistant", "prefill"])
async def test_image_of_an_assistant_is_the_same_text_in_each_request(
    proxy: RunningProxy, text: str
) -> None:
    session = await proxy.session()
    begun = {**asked("I see", FIRST), "role": "assistant"}
    more = {"continue_final_message": True, "add_generation_prompt": False}
    if text == "assistant":
        for _ in range(2):
            await chat(proxy, session, asked("x"), begun, asked("y", SECOND))
    else:
        for _ in range(2):
            await chat(proxy, session, asked(SECOND, "x"), begun, **more)
    first, second = ([t for t in call.prompt_ids if t >= 0] for call in proxy.engine.calls)
    assert first == second
    decoded = proxy.rendering.tokenizer.decode(first)
    assert "I see\n[image_url: image/png" in decoded
    assert MARK not in decoded


@pytest.mark.parametrize("space", ["\n", " \t\r\n"])
async def test_equal_bytes_in_other_base64_are_the_same_image(
    proxy: RunningProxy, space: str
) -> None:
    session = await proxy.session()
    text = encoded(FIRST)
    spaced = space.join(text[at : at + 7] for at in range(0, len(text), 7))
    other = f"DATA:image/PNG;charset=x;Base64,{spaced}"
    part = {"type": "image_url", "image_url": {"url": other}}
    answer = await chat(proxy, session, {"role": "user", "content": [part]})
    await chat(proxy, session, asked(FIRST), said(answer), asked("y"))
    assert seen(proxy) == [FIRST]
    assert await causes(proxy, session) == [None, None]


@pytest.mark.parametrize("space", ["\u2003", "\x85", "!", "\ud7ff"])
async def test_base64_with_other_characters_is_no_image(proxy: RunningProxy, space: str) -> None:
    session = await proxy.session()
    part = {"type": "image_url", "image_url": {"url": url(FIRST)[:-8] + space + url(FIRST)[-8:]}}
    await chat(proxy, session, {"role": "user", "content": [part]})
    assert seen(proxy) == []


async def test_images_of_gemini(proxy: RunningProxy) -> None:
    """In a question, and beside the result of a function; in the alphabet that Google's client
    writes."""
    session = await proxy.session()
    picture = PICTURE + bytes(range(248, 256)) * 6
    data = base64.urlsafe_b64encode(picture).decode()
    assert "_" in data
    part = {"inlineData": {"mimeType": "image/png", "data": data}}
    call = {"functionCall": {"name": "shot", "args": {}}}
    result = {
        "functionResponse": {"name": "shot", "response": {"output": "Here:"}, "parts": [part]}
    }
    contents = [
        {"role": "user", "parts": [{"text": "x"}, part]},
        {"role": "model", "parts": [call]},
        {"role": "user", "parts": [result]},
    ]
    address = f"{proxy.url}/{session.trial_id}/v1beta/models/m:generateContent"
    key = {"x-goog-api-key": session.api_key}
    body = {"contents": contents}
    async with proxy.http.post(address, json=body, headers=key) as response:
        assert response.status == 200, await response.text()
    assert seen(proxy) == [picture, picture]


async def test_several_answers_share_the_images(proxy: RunningProxy) -> None:
    session = await proxy.session()
    answer = await chat(proxy, session, asked(FIRST, "x"), n=3)
    again = answer["choices"][1]["message"]
    await chat(proxy, session, asked(FIRST, "x"), again, asked(SECOND), n=2)
    assert [proxy.engine.images.seen(call) for call in proxy.engine.calls] == [
        *([[FIRST]] * 3),
        *([[FIRST, SECOND]] * 2),
    ]


async def test_an_image_of_many_calls_at_once_is_prepared_once(proxy: RunningProxy) -> None:
    """As of a group of trials, which begin with the same screenshot."""
    sessions = [await proxy.session() for _ in range(8)]
    await asyncio.gather(*(chat(proxy, each, asked(FIRST, "x")) for each in sessions))
    assert proxy.engine.images.prepared == 1 + 1  # the probe of the engine's check


async def test_first_image_waits_for_the_engines_first_check(
    seeing_checkpoint: Any, seeing: Rendering, tmp_path: Any
) -> None:
    """While it is unknown whether an engine reads images, none is lost."""
    async with AsyncExitStack() as stack:
        engine = ScriptedEngine(lambda _: [], image_token=seeing.image_token)
        await stack.enter_async_context(engine)
        engine.answers_health.clear()
        start = await stack.enter_async_context(
            starting_proxies(seeing_checkpoint, seeing, tmp_path)
        )
        renderer = "template" if seeing.name == "template" else "auto"
        proxy = await start(engine=engine, rendering={"renderer": renderer})
        session = await proxy.session()
        asking = asyncio.create_task(chat(proxy, session, asked(FIRST, "x")))
        await engine.checked.wait()
        engine.answers_health.set()
        await asking
        assert seen(proxy) == [FIRST]


async def test_without_an_engine_images_wait_for_one_and_are_refused(
    start: StartProxy, seeing: Rendering
) -> None:
    proxy = await start(limits={"engine_patience_s": 0.5})
    await proxy.control.remove_engine((await proxy.control.engines())[0]["name"])
    session = await proxy.session()
    body = {"model": "m", "messages": [asked(FIRST, "x")], "max_tokens": 9}
    status, refused = await proxy.post(session, "chat/completions", body)
    assert status == 503, refused
    assert "try again" in refused["error"]["message"]
    await proxy.control.add_engine(proxy.engine.url)
    status, answer = await proxy.post(session, "chat/completions", body)
    assert status == 200, answer
    assert seen(proxy) == [FIRST]


async def test_engine_that_fails_to_prepare_gives_503_and_names_no_address(
    start: StartProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = await start(limits={"engine_patience_s": 0.5})
    session = await proxy.session()

    def broken(body: Any) -> Any:
        return {"token_ids": [], "features": None}

    monkeypatch.setattr(proxy.engine.images, "rendered", broken)
    body = orjson.dumps({"model": "m", "messages": [asked(FIRST, "x")], "max_tokens": 9})
    key = {"Authorization": f"Bearer {session.api_key}"}
    address = f"{session.base_url}/chat/completions"
    async with proxy.http.post(address, data=body, headers=key) as response:
        assert response.status == 503
        assert response.headers["Retry-After"]
        assert proxy.engine.url.removeprefix("http://") not in await response.text()


async def test_image_that_makes_the_engine_fail_is_shown_as_text(
    proxy: RunningProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM's 500 for one of 30,000 by 30,000 pixels, which has 74 bytes."""
    rendered = proxy.engine.images.rendered

    def failing(body: Any) -> Any:
        if encoded(SECOND) in orjson.dumps(body).decode():
            raise ScriptedRefusal(500, "could be decompression bomb DOS attack")
        return rendered(body)

    monkeypatch.setattr(proxy.engine.images, "rendered", failing)
    session = await proxy.session()
    answer = await chat(proxy, session, asked(FIRST, "x", SECOND))
    await chat(proxy, session, asked(FIRST, "x", SECOND), said(answer), asked("y"))
    assert seen(proxy) == [FIRST]
    assert await causes(proxy, session) == [None, None]


async def test_client_that_leaves_ends_the_preparation(
    start: StartProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = await start()
    session = await proxy.session()
    tries = asyncio.Queue[None]()

    def broken(body: Any) -> Any:
        tries.put_nowait(None)
        return {"token_ids": [], "features": None}

    monkeypatch.setattr(proxy.engine.images, "rendered", broken)
    body = {"model": "m", "messages": [asked(FIRST, "x")], "max_tokens": 9}
    asking = asyncio.create_task(proxy.post(session, "chat/completions", body))
    await tries.get()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    async with asyncio.timeout(20):
        while "agentic_proxy_in_flight_calls 0.0" not in await metrics(proxy):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def metrics(proxy: RunningProxy) -> str:
    key = {"Authorization": f"Bearer {ADMIN_KEY}"}
    async with proxy.http.get(f"{proxy.url}/metrics", headers=key) as response:
        return await response.text()


def test_joining_many_blocks_takes_time_in_proportion() -> None:
    """A body may have 200,000 blocks; at 20 ns a character, quadratic work would take minutes."""
    assert joined_blocks(["a", mark("0" * 64), "b", "", "c"]) == f"a{mark('0' * 64)}b\n\nc"
    assert len(joined_blocks(["x" * 50] * 200_000)) == 200_000 * 51 - 1
