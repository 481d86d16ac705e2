"""A search of the web that the proxy runs in the provider's place: in one answer of the agent, with
a turn for each answer of the model, and a history that extends them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.errors import ConfigurationError
from proxy.records import Turn, TurnStatus
from proxy.rendering.rendering import Rendering
from proxy.serving import provider_tools
from proxy.testing.scripted_engine import Fault, ScriptedEngine
from tests.proxy.conftest import RunningProxy, StartProxy, starting_proxies

CALL = '<tool_call>\n{"name": "web_search", "arguments": {"query": "otters"}}\n</tool_call>'
SHELL_CALL = '<tool_call>\n{"name": "shell", "arguments": {"command": "ls"}}\n</tool_call>'
SHELL = {"type": "object", "properties": {"command": {"type": "string"}}}
RESULT = {"title": "Otters", "url": "https://example.org/o", "text": "They\nswim. é"}
HOW = ["whole", "stream"]
asked_for: list[tuple[str, Mapping[str, Any]]] = []


async def search(query: str, tool: Mapping[str, Any]) -> list[dict[str, str]]:
    asked_for.append((query, tool))
    if query == "fail":
        raise OSError("no network")
    if query == "stall":
        await asyncio.Event().wait()
    return [{**RESULT, "title": f"{query} {len(asked_for)}"}]


def not_async(query: str, tool: Mapping[str, Any]) -> list[dict[str, str]]:
    return []


BACKEND = {"web_search": "tests.proxy.serving.test_provider_tools:search"}


@pytest.fixture(autouse=True)
def _no_searches() -> None:
    asked_for.clear()


def script(first: str = "Let me look.\n" + CALL) -> Any:
    """`first`, and once there is a result, what it says."""

    def answer(prompt: str) -> str:
        last = prompt.rpartition("<|im_start|>user")[2]
        if "<tool_response>" not in last:
            return "Bye." if "Go on." in last else first
        return f"Found {'otters' if 'They' in last else 'nothing'}."

    return answer


def messages_body(*messages: Any, stream: bool = False, **more: Any) -> dict[str, Any]:
    tools = [
        {"name": "shell", "input_schema": SHELL},
        {"type": "web_search_20250305", "name": "web_search", **more},
    ]
    first = {"role": "user", "content": "Look for otters."}
    return {
        "model": "m",
        "max_tokens": 500,
        "messages": [first, *messages],
        "tools": tools,
        "stream": stream,
    }


def responses_body(*items: Any, stream: bool = False) -> dict[str, Any]:
    tools = [
        {"type": "function", "name": "shell", "parameters": SHELL},
        {"type": "web_search"},
    ]
    first = {"role": "user", "content": "Look for otters."}
    return {"model": "m", "input": [first, *items], "tools": tools, "stream": stream}


async def ask(proxy: RunningProxy, session: Any, route: str, body: Any) -> dict[str, Any]:
    """The whole answer, also where it is streamed."""
    if not body["stream"]:
        status, answer = await proxy.post(session, route, body)
        assert status == 200, answer
        return dict(answer)
    events = [
        orjson.loads(event.partition(b"data: ")[2])
        for event in await proxy.events(session, route, body)
    ]
    if route == "responses":
        assert events[-1]["type"] == "response.completed", events[-1]
        done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
        assert done == events[-1]["response"]["output"]
        return dict(events[-1]["response"])
    content: list[dict[str, Any]] = []
    stop = None
    for event in events:
        if event["type"] == "content_block_start":
            content.append(event["content_block"])
            assert event["index"] == len(content) - 1
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "text_delta":
                content[-1]["text"] += delta["text"]
            else:
                content[-1]["json"] = content[-1].get("json", "") + delta["partial_json"]
        elif event["type"] == "message_delta":
            stop = event["delta"]["stop_reason"]
    for block in content:
        if "json" in block:
            block["input"] = orjson.loads(block.pop("json"))
    return {"content": content, "stop_reason": stop}


async def assert_goes_on(
    proxy: RunningProxy, session: Any, more: dict[str, Any], *, turns: int
) -> None:
    """The next request of Responses extends the one path of the session."""
    said = await ask(proxy, session, "responses", more)
    assert said["output"][0]["content"][0]["text"] == "Bye."
    assert_one_path((await proxy.record(session))[1], turns)


def assert_one_path(turns: list[Turn], count: int) -> None:
    assert len(turns) == count
    assert [turn.fork_cause for turn in turns] == [None] * count
    assert [turn.parent for turn in turns] == [None, *range(count - 1)]


@pytest.mark.parametrize("how", HOW)
async def test_model_searches_and_goes_on_in_the_same_answer_of_messages(
    start_proxy: StartProxy, how: str
) -> None:
    proxy = await start_proxy(tools=BACKEND)
    proxy.answers(script())
    session = await proxy.session()
    stream = how == "stream"
    answer = await ask(proxy, session, "messages", messages_body(stream=stream, max_uses=3))
    kinds = [block["type"] for block in answer["content"]]
    assert kinds == ["text", "server_tool_use", "web_search_tool_result", "text"]
    text, use, result, last = answer["content"]
    assert (text["text"], last["text"]) == ("Let me look.", "Found otters.")
    assert use["input"] == {"query": "otters"}
    assert result["tool_use_id"] == use["id"]
    assert result["content"][0]["url"] == RESULT["url"]
    assert answer["stop_reason"] == "end_turn"
    assert [query for query, _ in asked_for] == ["otters"]
    assert asked_for[0][1]["max_uses"] == 3
    back = [{"role": "assistant", "content": answer["content"]}]
    more = messages_body(*back, {"role": "user", "content": "Go on."}, stream=stream, max_uses=3)
    assert (await ask(proxy, session, "messages", more))["content"][0]["text"] == "Bye."
    _, turns = await proxy.record(session)
    assert_one_path(turns, 3)
    assert b"They" in turns[1].request
    prompt = proxy.rendering.tokenizer.decode(turns[0].prompt_ids.tolist())
    assert '"name": "web_search"' in prompt


@pytest.mark.parametrize("how", HOW)
async def test_model_searches_and_goes_on_in_the_same_answer_of_responses(
    checkpoint: Path, rendering: Rendering, tmp_path: Path, how: str
) -> None:
    """The history has no results and, as Codex sends it, no ids: they are in the record, also after
    a restart of the proxy."""
    stream = how == "stream"
    async with ScriptedEngine(lambda _: []) as engine:
        async with starting_proxies(checkpoint, rendering, tmp_path) as start:
            proxy = await start(engine=engine, tools=BACKEND)
            proxy.answers(script())
            session = await proxy.session()
            answer = await ask(proxy, session, "responses", responses_body(stream=stream))
            kinds = [item["type"] for item in answer["output"]]
            assert kinds == ["message", "web_search_call", "message"]
            assert answer["output"][1]["action"] == {"type": "search", "query": "otters"}
            assert answer["output"][1]["status"] == "completed"
            assert answer["output"][2]["content"][0]["text"] == "Found otters."
        back = [{k: v for k, v in item.items() if k != "id"} for item in answer["output"]]
        more = responses_body(*back, {"role": "user", "content": "Go on."}, stream=stream)
        async with starting_proxies(checkpoint, rendering, tmp_path) as start:
            again = await start(engine=engine, tools=BACKEND)
            again.answers(script())
            moved = replace(session, base_url=session.base_url.replace(proxy.url, again.url))
            await assert_goes_on(again, moved, more, turns=3)
    assert len(asked_for) == 1


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("route", ["messages", "responses"])
async def test_call_without_a_backend_gets_the_dialects_error_and_the_model_goes_on(
    proxy: RunningProxy, route: str, how: str
) -> None:
    proxy.answers(script())
    session = await proxy.session()
    stream = how == "stream"
    if route == "messages":
        answer = await ask(proxy, session, route, messages_body(stream=stream))
        error = {"type": "web_search_tool_result_error", "error_code": "unavailable"}
        assert answer["content"][2]["content"] == error
        assert answer["content"][3]["text"] == "Found nothing."
        back: Any = [{"role": "assistant", "content": answer["content"]}]
        more = messages_body(*back, {"role": "user", "content": "Go on."})
    else:
        answer = await ask(proxy, session, route, responses_body(stream=stream))
        assert answer["output"][1]["status"] == "failed"
        back = [{k: v for k, v in item.items() if k != "id"} for item in answer["output"]]
        more = responses_body(*back, {"role": "user", "content": "Go on."})
    await ask(proxy, session, route, more)
    _, turns = await proxy.record(session)
    assert_one_path(turns, 3)
    prompt = proxy.rendering.tokenizer.decode(turns[0].prompt_ids.tolist())
    assert "web_search" not in prompt
    await proxy.control.complete(session.trial_id)
    kinds = [event["kind"] async for event in proxy.control.events(session.trial_id)]
    assert kinds.count("tools_left_out") == 1
    assert kinds.count("provider_tools") == 1


@pytest.mark.parametrize("query", ["fail", "stall"])
async def test_backend_that_fails_gives_the_error(
    start_proxy: StartProxy, monkeypatch: pytest.MonkeyPatch, query: str
) -> None:
    monkeypatch.setattr(provider_tools, "SEARCH_TIMEOUT_S", 0.05)
    proxy = await start_proxy(tools=BACKEND)
    proxy.answers(script(CALL.replace("otters", query)))
    answer = await ask(proxy, await proxy.session(), "messages", messages_body())
    assert answer["content"][1]["content"]["error_code"] == "unavailable"
    assert answer["content"][2]["text"] == "Found nothing."


async def test_number_of_searches_is_the_agents(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(tools=BACKEND)
    proxy.answers(lambda prompt: CALL)
    session = await proxy.session()
    answer = await ask(proxy, session, "messages", messages_body(max_uses=2))
    results = [b for b in answer["content"] if b["type"] == "web_search_tool_result"]
    errors = [b["content"]["error_code"] for b in results if isinstance(b["content"], dict)]
    assert len(results) == 10
    assert errors == ["max_uses_exceeded"] * 8
    assert len(asked_for) == 1  # the same query has the same result
    assert answer["stop_reason"] == "pause_turn"
    assert_one_path((await proxy.record(session))[1], 10)


@pytest.mark.parametrize("how", HOW)
async def test_calls_of_both_kinds_in_one_answer(start_proxy: StartProxy, how: str) -> None:
    proxy = await start_proxy(tools=BACKEND)
    proxy.answers(script(CALL + "\n" + SHELL_CALL))
    session = await proxy.session()
    answer = await ask(proxy, session, "messages", messages_body(stream=how == "stream"))
    kinds = [block["type"] for block in answer["content"]]
    assert kinds == ["server_tool_use", "tool_use", "web_search_tool_result"]
    assert answer["stop_reason"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": answer["content"][1]["id"], "content": "a.py"}
    back = [{"role": "assistant", "content": answer["content"]}]
    more = messages_body(*back, {"role": "user", "content": [result]})
    assert (await ask(proxy, session, "messages", more))["content"][0]["text"] == "Found otters."
    assert_one_path((await proxy.record(session))[1], 2)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("left_out", [(), ("id",)])
@pytest.mark.parametrize(
    "calls",
    [
        (CALL, SHELL_CALL),
        (SHELL_CALL, CALL),
        (CALL, SHELL_CALL, CALL.replace("otters", "seals")),
        (SHELL_CALL, CALL, SHELL_CALL, CALL.replace("otters", "seals")),
    ],
)
async def test_calls_of_both_kinds_in_one_answer_of_responses(
    start_proxy: StartProxy, calls: tuple[str, ...], left_out: tuple[str, ...], how: str
) -> None:
    """The items of searches follow those of the agent's own calls, without the place that they had
    and, as Codex sends them, also without ids. The history extends the path all the same."""
    proxy = await start_proxy(tools=BACKEND)
    proxy.answers(script("\n".join(calls)))
    session = await proxy.session()
    answer = await ask(proxy, session, "responses", responses_body(stream=how == "stream"))
    own = [item for item in answer["output"] if item["type"] == "function_call"]
    searched = answer["output"][len(own) :]
    assert len(own) == calls.count(SHELL_CALL)
    assert {item["type"] for item in searched} == {"web_search_call"}
    assert len(searched) == len(calls) - len(own)
    back = [{k: v for k, v in item.items() if k not in left_out} for item in answer["output"]]
    back += [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "a.py"}
        for item in own
    ]
    more = await ask(proxy, session, "responses", responses_body(*back))
    assert more["output"][0]["content"][0]["text"] == "Found otters."
    back += [{k: v for k, v in more["output"][0].items() if k not in left_out}]
    last = responses_body(*back, {"role": "user", "content": "Go on."})
    assert (await ask(proxy, session, "responses", last))["output"][0]["content"][0][
        "text"
    ] == "Bye."
    assert_one_path((await proxy.record(session))[1], 3)


SEALS, CRABS = CALL.replace("otters", "seals"), CALL.replace("otters", "crabs")


@pytest.mark.parametrize("left_out", [(), ("id",)])
@pytest.mark.parametrize("backend", [BACKEND, {}])
@pytest.mark.parametrize(
    "answers",
    [
        (f"{CALL}\n{SEALS}",),
        (f"Let me look.\n{CALL}\n{SEALS}\n{CRABS}",),
        (CALL, SEALS),
        (CALL, f"{SEALS}\n{CRABS}"),
        (f"{CALL}\n{SEALS}", CRABS, f"{CALL}\n{SEALS}"),
        (f"{CALL}\n{CALL}", f"{CALL}\n{CALL}"),
    ],
)
async def test_searches_without_other_calls_of_responses_extend_the_path(
    start_proxy: StartProxy,
    answers: tuple[str, ...],
    backend: dict[str, str],
    left_out: tuple[str, ...],
) -> None:
    """The items are the same for searches of one answer and of several."""
    proxy = await start_proxy(tools=backend)

    def answer(prompt: str) -> str:
        if "Go on." in prompt:
            return "Bye."
        done = prompt.rpartition("Look for otters.")[2].count("<|im_start|>assistant") - 1
        return answers[done] if done < len(answers) else "Found them."

    proxy.answers(answer)
    session = await proxy.session()
    said = await ask(proxy, session, "responses", responses_body(stream=not backend))
    kinds = [item["type"] for item in said["output"] if item["type"] != "message"]
    assert kinds == ["web_search_call"] * "".join(answers).count("<tool_call>")
    back = [{k: v for k, v in item.items() if k not in left_out} for item in said["output"]]
    for n in range(2):
        back += [{"role": "user", "content": "Go on."}]
        said = await ask(proxy, session, "responses", responses_body(*back))
        back += [{k: v for k, v in each.items() if k not in left_out} for each in said["output"]]
        assert_one_path((await proxy.record(session))[1], len(answers) + 2 + n)


async def test_searches_of_one_answer_are_known_after_a_restart(
    checkpoint: Path, rendering: Rendering, tmp_path: Path
) -> None:
    async with ScriptedEngine(lambda _: []) as engine:
        async with starting_proxies(checkpoint, rendering, tmp_path) as start:
            proxy = await start(engine=engine, tools=BACKEND)
            proxy.answers(script(f"{CALL}\n{SEALS}"))
            session = await proxy.session()
            said = await ask(proxy, session, "responses", responses_body())
        back = [{k: v for k, v in each.items() if k != "id"} for each in said["output"]]
        async with starting_proxies(checkpoint, rendering, tmp_path) as start:
            again = await start(engine=engine, tools=BACKEND)
            again.answers(script())
            session = replace(session, base_url=session.base_url.replace(proxy.url, again.url))
            more = responses_body(*back, {"role": "user", "content": "Go on."})
            await ask(again, session, "responses", more)
            assert_one_path((await again.record(session))[1], 3)
    assert len(asked_for) == 2


async def test_retry_gets_the_recorded_answers(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(tools=BACKEND)
    proxy.answers(script())
    session = await proxy.session()
    first = await ask(proxy, session, "messages", messages_body())
    headers: dict[str, Any] = {"x-stainless-retry-count": "1"}
    status, again = await proxy.post(session, "messages", messages_body(), **headers)
    assert status == 200
    assert again["content"] == first["content"]
    assert_one_path((await proxy.record(session))[1], 2)
    assert len(asked_for) == 1


async def test_answer_that_was_lost_after_the_search_is_continued_by_the_retry(
    start_proxy: StartProxy,
) -> None:
    proxy = await start_proxy(tools=BACKEND, limits={"engine_patience_s": 0})
    proxy.answers(script())
    session = await proxy.session()
    faults: list[Any] = [None, *[Fault("die", after_tokens=1)] * 4]
    proxy.engine.faults = faults
    status, _ = await proxy.post(session, "messages", messages_body())
    assert status == 503
    proxy.engine.faults = []
    answer = await ask(proxy, session, "messages", messages_body())
    assert answer["content"][-1]["text"] == "Found otters."
    _, turns = await proxy.record(session)
    assert [turn.status for turn in turns] == [TurnStatus.DONE, TurnStatus.CUT, TurnStatus.DONE]
    assert len(asked_for) == 1


async def test_tool_of_the_agent_with_that_name_stays_its_own(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(tools=BACKEND)
    proxy.answers(script(CALL))
    body = messages_body()
    body["tools"][1] = {"name": "web_search", "input_schema": {"type": "object"}}
    answer = await ask(proxy, await proxy.session(), "messages", body)
    assert [block["type"] for block in answer["content"]] == ["tool_use"]
    assert answer["stop_reason"] == "tool_use"


async def test_search_alone_with_a_backend_is_a_request(start_proxy: StartProxy) -> None:
    """As Claude Code's WebSearch makes it; without a backend it gets a 400."""
    proxy = await start_proxy(tools=BACKEND)
    proxy.answers(script(CALL))
    body = messages_body()
    del body["tools"][0]
    body["tool_choice"] = {"type": "tool", "name": "web_search"}
    answer = await ask(proxy, await proxy.session(), "messages", body)
    assert answer["content"][-1]["text"] == "Found otters."


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("tests.proxy.serving.test_provider_tools:not_async", "not a coroutine function"),
        ("no_such_module:search", "cannot import no_such_module:search"),
    ],
)
async def test_backend_that_cannot_be_used_is_refused(
    start_proxy: StartProxy, path: str, words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        await start_proxy(tools={"web_search": path})
