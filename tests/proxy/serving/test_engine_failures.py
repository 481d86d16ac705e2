"""Engines that fail in mid-answer, as an agent sees it and as the record has it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast
from urllib.parse import urlsplit

import aiohttp
import numpy as np
import pytest

from proxy.records import SessionKind, Turn, TurnStatus
from proxy.testing.scripted_engine import Fault
from tests.proxy.conftest import ADMIN_KEY, RunningProxy, StartProxy
from tests.proxy.continued import Continued

CHAT = "chat/completions"
TEXT = "One two three four five six seven eight nine ten."
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "a file"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Count."}], **more}


def says(proxy: RunningProxy, text: str) -> list[int]:
    """The ids of the answer, its end included."""
    proxy.answers(text)
    proxy.engine.script = Continued(proxy.engine.script)
    return list(proxy.engine.script([0]))


async def ask(proxy: RunningProxy, body: dict[str, Any], **session: Any) -> tuple[Any, Turn]:
    """The answer of a new session's call, and its turn."""
    handle = await proxy.session(**session)
    status, reply = await proxy.post(handle, CHAT, body)
    assert status == 200, reply
    _, (turn,) = await proxy.record(handle)
    return reply["choices"][0], turn


@pytest.mark.parametrize(
    ("text", "body"),
    [
        (TEXT, {}),
        (TEXT, {"stop": ["six seven"]}),
        (f"I look.\n{CALL}", {"tools": TOOLS, "parallel_tool_calls": False}),
        (TEXT, {"logprobs": True, "top_logprobs": 1}),
    ],
    ids=["text", "stop string", "tool call", "log-probabilities"],
)
async def test_answer_and_record_are_those_of_an_undisturbed_call_wherever_the_engine_dies(
    text: str, body: dict[str, Any], proxy: RunningProxy
) -> None:
    ids = says(proxy, text)
    kind = SessionKind.EVAL if "top_logprobs" in body else SessionKind.TRAIN
    # A stream, so that the engine has sent tokens before it dies.
    asked = chat(**body)
    expected, undisturbed = await ask(proxy, asked, kind=kind)
    for tokens in range(1, len(undisturbed.sampled_ids), 2):
        handle = await proxy.session(kind=kind)
        proxy.engine.faults = [Fault("die", after_tokens=tokens)]
        events = await proxy.events(handle, CHAT, {**asked, "stream": True})
        _, (turn,) = await proxy.record(handle)
        assert events[-1] == b"data: [DONE]"
        choices = [json.loads(e[6:])["choices"] for e in events if e.startswith(b"data: {")]
        said = "".join(c[0]["delta"].get("content") or "" for c in choices if c)
        assert said == (expected["message"]["content"] or "")
        assert [c[0]["finish_reason"] for c in choices if c][-1] == expected["finish_reason"]
        assert turn.status is TurnStatus.DONE
        assert turn.sampled_ids.tolist() == undisturbed.sampled_ids.tolist()
        np.testing.assert_array_equal(turn.logprobs, undisturbed.logprobs)
        assert [(s.version, s.start, s.end) for s in turn.versions] == [
            (0, 0, len(turn.sampled_ids))
        ]
        assert turn.answer_key == undisturbed.answer_key
    assert undisturbed.sampled_ids.tolist() == ids[: len(undisturbed.sampled_ids)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "body", "ends"),
    [
        (TEXT, {"stop": ["six seven"]}, "six seven"),
        (f"I look.\n{CALL}\n{CALL}", {"tools": TOOLS, "parallel_tool_calls": False}, "<tool_call>"),
    ],
    ids=["stop string", "second call"],
)
async def test_record_ends_with_the_text_however_tokens_arrive(
    text: str, body: dict[str, Any], ends: str, stream: bool, proxy: RunningProxy
) -> None:
    says(proxy, text)
    found = []
    for proxy.engine.tokens_at_once in (1, 2, 3, 7, 1000):
        handle = await proxy.session()
        if stream:
            await proxy.events(handle, CHAT, {**chat(**body), "stream": True})
        else:
            await proxy.post(handle, CHAT, chat(**body))
        _, (turn,) = await proxy.record(handle)
        assert [(s.start, s.end) for s in turn.versions] == [(0, len(turn.sampled_ids))]
        assert len(turn.logprobs) == len(turn.sampled_ids)
        said = json.loads(turn.answer)
        calls = [(call["name"], call["arguments"]) for call in said["tool_calls"]]
        found.append((turn.sampled_ids.tolist(), said["text"], calls, turn.finish_reason))
    assert found == found[:1] * 5
    ids, decode = found[0][0], proxy.rendering.tokenizer.decode
    assert ends in decode(ids)
    assert decode(ids).count(ends) > decode(ids[:-1]).count(ends)


async def test_each_of_several_answers_goes_on_by_itself(proxy: RunningProxy) -> None:
    ids = says(proxy, TEXT)
    session = await proxy.session()
    proxy.engine.faults = [Fault("die", after_tokens=3), Fault("abort", after_tokens=5)]
    events = await proxy.events(session, CHAT, chat(n=2, stream=True))
    assert events[-1] == b"data: [DONE]"
    _, turns = await proxy.record(session)
    assert [turn.sampled_ids.tolist() for turn in turns] == [ids] * 2


async def test_finished_answer_is_cut_with_the_call_if_another_one_fails(
    start_proxy: StartProxy,
) -> None:
    proxy = await start_proxy(limits={"engine_patience_s": 1.0})
    ids = says(proxy, TEXT)
    session = await proxy.session()
    proxy.engine.healthy = False  # the answer that breaks is not continued
    proxy.engine.faults = [Fault("die", after_tokens=3)]
    events = await proxy.events(session, CHAT, chat(n=2, stream=True))
    assert b"error" in events[-1]
    _, turns = await proxy.record(session)
    assert sorted(len(turn.sampled_ids) for turn in turns) == [3, len(ids)]
    assert [turn.status for turn in turns] == [TurnStatus.CUT] * 2


async def test_resumption_is_an_event_and_is_counted(proxy: RunningProxy) -> None:
    says(proxy, TEXT)
    session = await proxy.session()
    name = (await proxy.control.engines())[0]["name"]
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    url = f"{proxy.url}/sessions/{session.trial_id}/events"
    events = {**headers, "Accept": "text/event-stream"}
    async with proxy.http.get(url, headers=events) as stream:
        proxy.engine.faults = [Fault("die", after_tokens=4)]
        await proxy.events(session, CHAT, chat(stream=True))
        async for line in stream.content:
            if b'"resumed"' in line:
                event = json.loads(line.removeprefix(b"data: "))
                break
    del event["at"]
    assert event == {
        "kind": "resumed",
        "index": 0,
        "at_token": 4,
        "from_engine": name,
        "to_engine": name,
        "cause": "lost",
    }
    async with proxy.http.get(f"{proxy.url}/metrics", headers=headers) as response:
        metrics = await response.text()
    assert 'agentic_proxy_resumed_generations_total{cause="lost"} 1.0' in metrics


@pytest.mark.parametrize("route", [CHAT, "messages", "responses"])
async def test_agent_is_told_when_to_retry_when_no_engine_comes_back(
    route: str, start_proxy: StartProxy
) -> None:
    proxy = await start_proxy(limits={"engine_patience_s": 0.1})
    says(proxy, TEXT)
    proxy.engine.healthy = False
    proxy.engine.faults = [Fault("die")] * 9
    session = await proxy.session()
    body = {"model": "m", "max_tokens": 99, "messages": chat()["messages"]}
    if route == "responses":
        body = {"model": "m", "input": "Count."}
    headers = {"Authorization": f"Bearer {session.api_key}"}
    async with proxy.http.post(
        f"{session.base_url}/{route}", json=body, headers=headers
    ) as response:
        assert response.status == 503
        assert int(response.headers["Retry-After"]) >= 1
        assert "error" in await response.json()
    _, (turn,) = await proxy.record(session)
    assert turn.status is TurnStatus.CUT


async def test_client_that_leaves_while_its_answer_waits_leaves_a_cut_turn(
    start_proxy: StartProxy,
) -> None:
    proxy = await start_proxy(limits={"keep_alive_s": 0.05})
    ids = says(proxy, TEXT)
    proxy.engine.healthy = False
    proxy.engine.faults = [Fault("die", after_tokens=4)]
    session = await proxy.session()
    headers = {"Authorization": f"Bearer {session.api_key}"}
    url = f"{session.base_url}/{CHAT}"
    async with (
        aiohttp.ClientSession() as http,
        http.post(url, json=chat(stream=True), headers=headers) as response,
    ):
        async for line in response.content:
            if line.startswith(b":"):  # a keep-alive: the answer stands still
                break
    await proxy.control.complete(session.trial_id)
    _, (turn,) = await proxy.record(session)
    assert turn.status is TurnStatus.CUT
    assert turn.sampled_ids.tolist() == ids[:4]
    assert turn.versions[-1].end == 4
    assert (await proxy.control.engines())[0]["in_flight"] == 0


@asynccontextmanager
async def engine_process(port: int) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A scripted engine in a process of its own, and its URL. Its answer has 200 tokens."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "proxy.testing.scripted_engine", "--port", str(port)),
        *("--token-delay-s", "0.01"),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    url = (await process.stdout.readline()).decode().strip()
    try:
        yield process, url
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.slow
async def test_answer_goes_on_when_a_killed_engine_process_is_started_again(
    start_proxy: StartProxy,
) -> None:
    proxy = await start_proxy()
    for engine in await proxy.control.engines():
        await proxy.control.remove_engine(engine["name"])
    session = await proxy.session()
    headers = {"Authorization": f"Bearer {session.api_key}"}
    body = chat(stream=True, max_tokens=60)
    async with engine_process(0) as (process, url):
        await proxy.control.add_engine(url, name="killed")
        response = await proxy.http.post(f"{session.base_url}/{CHAT}", json=body, headers=headers)
        for _ in range(10):
            await response.content.readline()
        process.kill()
        await process.wait()
    async with engine_process(int(url.rpartition(":")[2])):
        rest = await response.content.read()
    assert rest.endswith(b"data: [DONE]\n\n")
    _, (turn,) = await proxy.record(session)
    assert turn.status is TurnStatus.DONE
    assert turn.sampled_ids.tolist() == [7] * 60
    assert [(span.start, span.end) for span in turn.versions] == [(0, 60)]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("route", [CHAT, "messages", "responses"])
async def test_request_that_kills_its_engines_fails_in_its_dialect_and_the_session_goes_on(
    route: str, stream: bool, start_proxy: StartProxy
) -> None:
    proxy = await start_proxy(limits={"keep_alive_s": 60})  # a stream begins with what keeps it
    ids, engine = says(proxy, TEXT), proxy.engine
    answers, port = engine.script, urlsplit(engine.url).port or 0
    ends: list[asyncio.Task[None]] = []

    async def restart() -> None:
        await engine.die()
        await engine.close()
        await asyncio.sleep(0.2)
        await engine.start(port=port)

    async def script(prompt_ids: list[int]) -> list[int]:
        if "POISON" in proxy.rendering.tokenizer.decode(prompt_ids):
            ends.append(asyncio.create_task(restart()))
            await asyncio.Event().wait()
        return list(cast("list[int]", answers(prompt_ids)))

    engine.script = script
    session = await proxy.session()

    def body(text: str) -> dict[str, Any]:
        if route == "responses":
            return {"input": text, "stream": stream}
        said = [{"role": "user", "content": text}]
        return {"messages": said, "max_tokens": 50, "stream": stream}

    status, reply = await proxy.post(session, route, body("POISON"))
    assert status == 400
    assert reply["error"]["type"] == "invalid_request_error"
    assert "this request took down 2 engines" in reply["error"]["message"]
    await asyncio.gather(*ends)
    assert len(ends) == 2
    if stream:
        await proxy.events(session, route, body("Count."))
    else:
        assert (await proxy.post(session, route, body("Count.")))[0] == 200
    _, turns = await proxy.record(session)
    assert [turn.sampled_ids.tolist() for turn in turns if turn.status is TurnStatus.DONE] == [ids]
