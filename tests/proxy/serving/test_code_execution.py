"""Code that the proxy runs in the provider's place, in one answer of the agent: by a backend, once,
with a turn for each answer of the model, and a history that extends them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic.types
import openai.types.responses
import orjson
import pytest
from pydantic import TypeAdapter

from proxy.rendering.rendering import Rendering
from proxy.serving import provider_tools
from proxy.testing.scripted_engine import ScriptedEngine
from proxy.wire.code_execution import Execution
from tests.proxy.conftest import StartProxy, starting_proxies
from tests.proxy.serving.test_provider_tools import (
    SHELL,
    SHELL_CALL,
    ask,
    assert_goes_on,
    assert_one_path,
)
from tests.proxy.wire.test_gemini import ask as ask_google
from tests.proxy.wire.test_gemini import streamed

PYTHON = "code_execution"
BASH = "bash_code_execution"
HOW = ["whole", "stream"]
ran: list[Execution] = []


async def run(execution: Execution, tool: Mapping[str, Any]) -> dict[str, Any]:
    ran.append(execution)
    if execution.code == "fail":
        raise OSError("no sandbox")
    if execution.code == "stall":
        await asyncio.Event().wait()
    if execution.code == "slow":
        raise TimeoutError
    if execution.code == "types":
        return {"stdout": b"bytes"}
    if execution.code == "long":
        return {"stdout": "x" * 2**20 + "\ud800", "stderr": "end", "return_code": 1}
    return {"stdout": f"{execution.code} {len(ran)}\n", "stderr": "é", "return_code": 3}


BACKEND = {"code_execution": "tests.proxy.serving.test_code_execution:run"}


@pytest.fixture(autouse=True)
def _nothing_ran() -> None:
    ran.clear()


def called(code: str, name: str = PYTHON) -> str:
    field = "command" if name == BASH else "code"
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"{field}": "{code}"}}}}\n</tool_call>'


def script(*answers: str) -> Any:
    """The answers, one after each request for the task; then "Done."; and "Bye." for "Go on."."""

    def answer(prompt: str) -> str:
        if "Go on." in prompt:
            return "Bye."
        done = prompt.rpartition("Count.")[2].count("<|im_start|>assistant") - 1
        return answers[done] if done < len(answers) else "Done."

    return answer


def messages_body(*messages: Any, kind: str = "20250825", **more: Any) -> dict[str, Any]:
    tool = {"type": f"code_execution_{kind}", "name": "code_execution"}
    return {
        "model": "m",
        "max_tokens": 500,
        "messages": [{"role": "user", "content": "Count."}, *messages],
        "tools": [{"name": "shell", "input_schema": SHELL}, {**tool, **more}],
        "stream": False,
    }


def responses_body(*items: Any, include: bool = True, stream: bool = False) -> dict[str, Any]:
    tools = [
        {"type": "function", "name": "shell", "parameters": SHELL},
        {"type": "code_interpreter", "container": {"type": "auto"}},
    ]
    return {
        "model": "m",
        "input": [{"role": "user", "content": "Count."}, *items],
        "tools": tools,
        "stream": stream,
        "include": ["code_interpreter_call.outputs"] if include else [],
    }


ROOT = Path(__file__).parents[3]
GO_ON = {"role": "user", "content": "Go on."}
BLOCKS: TypeAdapter[Any] = TypeAdapter(anthropic.types.ContentBlock)
ITEMS: TypeAdapter[Any] = TypeAdapter(openai.types.responses.ResponseOutputItem)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    ("name", "kind"), [(PYTHON, "20250522"), (PYTHON, "20260521"), (BASH, "20250825")]
)
async def test_model_runs_code_and_goes_on_in_the_same_answer_of_messages(
    start_proxy: StartProxy, name: str, kind: str, how: str
) -> None:
    proxy = await start_proxy(tools=BACKEND)
    proxy.answers(script("Look.\n" + called("1+1", name)))
    session = await proxy.session()
    body = messages_body(kind=kind) | {"stream": how == "stream"}
    answer = await ask(proxy, session, "messages", body)
    text, use, result, last = answer["content"]
    assert (text["text"], last["text"]) == ("Look.", "Done.")
    assert (use["type"], use["name"]) == ("server_tool_use", name)
    assert use["input"] == {"command" if name == BASH else "code": "1+1"}
    assert result == {
        "type": f"{name}_tool_result",
        "tool_use_id": use["id"],
        "content": {
            "type": f"{name}_result",
            "stdout": "1+1 1\n",
            "stderr": "é",
            "return_code": 3,
            "content": [],
        },
    }
    for block in answer["content"]:
        BLOCKS.validate_python(block)
    assert answer["stop_reason"] == "end_turn"
    (execution,) = ran
    assert execution.language == ("bash" if name == BASH else "python")
    assert execution.session_id == session.trial_id
    back = {"role": "assistant", "content": answer["content"]}
    more = await ask(proxy, session, "messages", messages_body(back, GO_ON, kind=kind))
    assert more["content"][0]["text"] == "Bye."
    _, turns = await proxy.record(session)
    assert_one_path(turns, 3)
    prompt = proxy.rendering.tokenizer.decode(turns[0].prompt_ids.tolist())
    assert ('"bash_code_execution"' in prompt) == (kind != "20250522")
    decode = proxy.rendering.tokenizer.decode
    assert '"return_code":3' in decode(turns[1].prompt_ids.tolist())
    assert not any("return_code" in decode(turn.sampled_ids.tolist()) for turn in turns)


@pytest.mark.parametrize("left_out", [(), ("id",)])
@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("how", HOW)
async def test_model_runs_code_and_goes_on_in_the_same_answer_of_responses(
    checkpoint: Path,
    rendering: Rendering,
    tmp_path: Path,
    how: str,
    include: bool,
    left_out: tuple[str, ...],
) -> None:
    """The same code runs twice, with other results, and fails once; then the proxy is restarted."""
    stream = how == "stream"
    first = responses_body(include=include, stream=stream)
    async with ScriptedEngine(lambda _: []) as engine:
        async with starting_proxies(checkpoint, rendering, tmp_path) as start:
            proxy = await start(engine=engine, tools=BACKEND)
            proxy.answers(script("Look.\n" + called("n"), called("n"), called("fail")))
            session = await proxy.session()
            answer = await ask(proxy, session, "responses", first)
        for item in answer["output"]:
            ITEMS.validate_python(item)
        _, one, two, failed, last = answer["output"]
        assert {item["type"] for item in (one, two, failed)} == {"code_interpreter_call"}
        assert [item["code"] for item in (one, two, failed)] == ["n", "n", "fail"]
        assert [item["status"] for item in (one, failed)] == ["completed", "failed"]
        assert last["content"][0]["text"] == "Done."
        for number, item in enumerate((one, two), 1):
            logs = [{"type": "logs", "logs": f"n {number}\né"}]
            assert item["outputs"] == (logs if include else None)
        back = [{k: v for k, v in item.items() if k not in left_out} for item in answer["output"]]
        more = responses_body(*back, GO_ON, include=include, stream=stream)
        async with starting_proxies(checkpoint, rendering, tmp_path) as start:
            again = await start(engine=engine, tools=BACKEND)
            again.answers(script())
            moved = replace(session, base_url=session.base_url.replace(proxy.url, again.url))
            await assert_goes_on(again, moved, more, turns=5)
    assert len(ran) == 3


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("fail", "unavailable"),
        ("types", "unavailable"),
        ("stall", "execution_time_exceeded"),
        ("slow", "execution_time_exceeded"),
        ("", "invalid_tool_input"),
    ],
)
@pytest.mark.parametrize("name", [PYTHON, BASH])
async def test_backend_that_fails_gives_the_dialects_error(
    start_proxy: StartProxy, monkeypatch: pytest.MonkeyPatch, name: str, source: str, code: str
) -> None:
    monkeypatch.setattr(provider_tools, "CODE_TIMEOUT_S", 0.05)
    proxy = await start_proxy(tools=BACKEND)
    proxy.answers(script(called(source, name)))
    session = await proxy.session()
    answer = await ask(proxy, session, "messages", messages_body())
    _, result, last = answer["content"]
    assert result["content"] == {"type": f"{name}_tool_result_error", "error_code": code}
    BLOCKS.validate_python(result)
    assert last["text"] == "Done."
    back = {"role": "assistant", "content": answer["content"]}
    await ask(proxy, session, "messages", messages_body(back, GO_ON))
    assert_one_path((await proxy.record(session))[1], 3)


async def test_middle_of_a_long_output_is_left_out(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(tools=BACKEND, max_context_tokens=200_000)
    proxy.answers(script(called("long")))
    session = await proxy.session()
    answer = await ask(proxy, session, "messages", messages_body())
    content = answer["content"][1]["content"]
    assert len(content["stdout"]) < 31_000
    assert "[1018577 characters are left out]" in content["stdout"]
    assert content["stdout"].endswith("x?")
    assert (content["stderr"], content["return_code"]) == ("end", 1)
    back = {"role": "assistant", "content": answer["content"]}
    await ask(proxy, session, "messages", messages_body(back, GO_ON))
    assert_one_path((await proxy.record(session))[1], 3)


@pytest.mark.parametrize("route", ["messages", "responses"])
async def test_call_without_a_backend_gets_the_dialects_error(
    start_proxy: StartProxy, route: str
) -> None:
    proxy = await start_proxy()
    proxy.answers(script(called("1")))
    session = await proxy.session()
    body = messages_body if route == "messages" else responses_body
    answer = await ask(proxy, session, route, body())
    back: list[Any] = [{"role": "assistant", "content": answer.get("content")}]
    if route == "messages":
        assert answer["content"][1]["content"]["error_code"] == "unavailable"
    else:
        assert answer["output"][0]["status"] == "failed"
        back = [{k: v for k, v in item.items() if k != "id"} for item in answer["output"]]
    await ask(proxy, session, route, body(*back, GO_ON))
    _, turns = await proxy.record(session)
    assert_one_path(turns, 3)
    assert "code_execution" not in proxy.rendering.tokenizer.decode(turns[0].prompt_ids.tolist())
    await proxy.control.complete(session.trial_id)
    events = [event async for event in proxy.control.events(session.trial_id)]
    assert [e["kind"] for e in events].count("tools_left_out") == 1


@pytest.mark.parametrize("route", ["messages", "responses"])
async def test_retry_gets_the_recorded_result(start_proxy: StartProxy, route: str) -> None:
    """The same code is run for each call, but only once for a call that is sent again."""
    proxy = await start_proxy(tools=BACKEND)
    proxy.answers(script(called("n"), called("n")))
    session = await proxy.session()
    body: Any = messages_body if route == "messages" else responses_body
    first = await ask(proxy, session, route, body())
    headers: dict[str, Any] = {"x-stainless-retry-count": "1"}
    status, again = await proxy.post(session, route, body(), **headers)
    assert status == 200
    output = "content" if route == "messages" else "output"
    own = [(block["type"], block.get("outputs"), block.get("content")) for block in first[output]]
    assert [(b["type"], b.get("outputs"), b.get("content")) for b in again[output]] == own
    assert_one_path((await proxy.record(session))[1], 3)
    assert [each.call.partition("_")[0] for each in ran] == ["0", "1"]


@pytest.mark.parametrize("route", ["messages", "responses"])
async def test_proxy_that_is_killed_between_call_and_result_runs_the_call_again(
    checkpoint: Path, rendering: Rendering, tmp_path: Path, route: str
) -> None:
    """The store is copied at the moment when the code runs, as `kill -9` would leave it: the retry
    gets the recorded call, whose code is run again with the same name, and one path."""
    body: Any = messages_body if route == "messages" else responses_body
    async with ScriptedEngine(lambda _: []) as engine:
        async with starting_proxies(checkpoint, rendering, tmp_path) as start:
            proxy = await start(engine=engine, tools=BACKEND)
            proxy.answers(script(called("stall")))
            session = await proxy.session()
            asking = asyncio.ensure_future(proxy.post(session, route, body()))
            while not ran:
                await asyncio.wait([asking], timeout=0.01)
            before = {f.name: f.read_bytes() for f in tmp_path.iterdir() if f.is_file()}
            asking.cancel()
            await asyncio.wait([asking])
        copied = tmp_path / "copied"
        copied.mkdir()
        for name, data in before.items():
            (copied / name).write_bytes(data)
        async with starting_proxies(checkpoint, rendering, copied) as start:
            again = await start(engine=engine, tools={"code_execution": f"{__name__}:run_again"})
            again.answers(script(called("never")))
            session = replace(session, base_url=session.base_url.replace(proxy.url, again.url))
            answer = await ask(again, session, route, body())
            assert [e.call for e in ran] == [ran[0].call] * 2
            said = answer["content" if route == "messages" else "output"]
            assert len(said) == (3 if route == "messages" else 2)
            assert_one_path((await again.record(session))[1], 2)


async def run_again(execution: Execution, tool: Mapping[str, Any]) -> dict[str, Any]:
    ran.append(execution)
    return {"stdout": "again"}


async def test_number_of_calls_is_the_agents(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(tools=BACKEND)
    proxy.answers(lambda prompt: called("n"))
    session = await proxy.session()
    answer = await ask(proxy, session, "messages", messages_body(max_uses=2))
    results = [b["content"] for b in answer["content"] if b["type"].endswith("_tool_result")]
    assert [each.get("error_code") for each in results] == [None] * 2 + ["too_many_requests"] * 8
    assert len(ran) == 2
    assert answer["stop_reason"] == "pause_turn"
    assert_one_path((await proxy.record(session))[1], 10)


@pytest.mark.parametrize("left_out", [(), ("id",)])
@pytest.mark.parametrize("route", ["messages", "responses"])
async def test_two_calls_beside_one_of_the_agent(
    start_proxy: StartProxy, route: str, left_out: tuple[str, ...]
) -> None:
    """Two equal calls in one answer are two executions."""
    proxy = await start_proxy(tools=BACKEND)
    proxy.answers(script(f"{called('n')}\n{SHELL_CALL}\n{called('n')}"))
    session = await proxy.session()
    if route == "messages":
        answer = await ask(proxy, session, route, messages_body())
        assert answer["stop_reason"] == "tool_use"
        (use,) = [block for block in answer["content"] if block["type"] == "tool_use"]
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": "a.py"}
        back: Any = [{"role": "assistant", "content": answer["content"]}]
        more = messages_body(*back, {"role": "user", "content": [result]})
    else:
        answer = await ask(proxy, session, route, responses_body(include=False))
        assert [item["type"] for item in answer["output"]] == [
            "function_call",
            *["code_interpreter_call"] * 2,
        ]
        back = [{k: v for k, v in item.items() if k not in left_out} for item in answer["output"]]
        output = {"type": "function_call_output", "output": "a.py"}
        more = responses_body(*back, {**output, "call_id": back[0]["call_id"]}, include=False)
    assert len(ran) == 2
    await ask(proxy, session, route, more)
    assert_one_path((await proxy.record(session))[1], 2)


async def test_results_beyond_the_memory_are_read_from_the_record(
    start_proxy: StartProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of searches, too: each result is longer than what a session keeps."""
    monkeypatch.setattr(provider_tools, "KEPT_CHARS", 10)
    tools = {**BACKEND, "web_search": "tests.proxy.serving.test_provider_tools:search"}
    proxy = await start_proxy(tools=tools)
    search = '<tool_call>\n{"name": "web_search", "arguments": {"query": "%s"}}\n</tool_call>'
    proxy.answers(script(search % "a", called("n"), search % "b", called("n")))
    session = await proxy.session()

    def body(*items: Any) -> dict[str, Any]:
        found = responses_body(*items, include=False)
        return {**found, "tools": [*found["tools"], {"type": "web_search"}]}

    answer = await ask(proxy, session, "responses", body())
    for _ in range(2):
        back = [{k: v for k, v in item.items() if k != "id"} for item in answer["output"]]
        await ask(proxy, session, "responses", body(*back, GO_ON))
    turns = (await proxy.record(session))[1]
    assert [turn.fork_cause for turn in turns][:6] == [None] * 6


async def test_function_of_the_agent_with_that_name_stays_its_own(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(tools=BACKEND)
    proxy.answers(script(called("1")))
    body = messages_body()
    body["tools"][1] = {"name": "code_execution", "input_schema": {"type": "object"}}
    answer = await ask(proxy, await proxy.session(), "messages", body)
    assert [block["type"] for block in answer["content"]] == ["tool_use"]
    assert not ran


def google_body(*contents: Any, **more: Any) -> dict[str, Any]:
    declared = {"name": "shell", "parametersJsonSchema": SHELL}
    return {
        "contents": [{"role": "user", "parts": [{"text": "Count."}]}, *contents],
        "tools": [{"functionDeclarations": [declared]}, {"codeExecution": {}}],
        **more,
    }


async def generated(proxy: Any, session: Any, body: Any, how: str = "whole") -> list[Any]:
    """The parts of the answer; adjacent texts as one."""
    if how == "stream":
        status, data = await ask_google(proxy, session, body, "streamGenerateContent", "?alt=sse")
        assert status == 200, data
        return with_whole_texts(streamed(data)[0])
    status, data = await ask_google(proxy, session, body)
    assert status == 200, data
    return with_whole_texts(orjson.loads(data)["candidates"][0]["content"]["parts"])


def with_whole_texts(parts: list[Any]) -> list[Any]:
    out: list[Any] = []
    for part in parts:
        if out and "text" in part and "text" in out[-1]:
            out[-1] = {"text": out[-1]["text"] + part["text"]}
        elif part.get("text") != "":
            out.append(part)
    return out


def google_go_on(parts: list[Any], left_out: tuple[str, ...] = ()) -> list[Any]:
    """The answer with `parts` and a next message; in one content, as Google's REST API has it."""
    kept = [
        {kind: {k: v for k, v in said.items() if k not in left_out} for kind, said in part.items()}
        if "text" not in part
        else part
        for part in parts
    ]
    return [{"role": "model", "parts": kept}, {"role": "user", "parts": [{"text": "Go on."}]}]


@pytest.mark.parametrize("left_out", [(), ("id",)])
@pytest.mark.parametrize("how", HOW)
async def test_model_runs_code_and_goes_on_in_the_same_answer_of_generate_content(
    checkpoint: Path, rendering: Rendering, tmp_path: Path, how: str, left_out: tuple[str, ...]
) -> None:
    """The same code runs twice, with other results, and fails once; then the proxy is restarted.
    The agent returns each part in a content of its own, as Google's SDKs keep a stream."""
    async with ScriptedEngine(lambda _: []) as engine:
        async with starting_proxies(checkpoint, rendering, tmp_path) as start:
            proxy = await start(engine=engine, tools=BACKEND)
            proxy.answers(script("Look.\n" + called("n"), called("n"), called("fail")))
            session = await proxy.session()
            parts = await generated(proxy, session, google_body(), how)
        kinds = [next(iter(part)) for part in parts]
        assert kinds == ["text", *["executableCode", "codeExecutionResult"] * 3, "text"]
        assert (parts[0]["text"].strip(), parts[-1]["text"]) == ("Look.", "Done.")
        codes = [part["executableCode"] for part in parts[1:7:2]]
        assert [each["code"] for each in codes] == ["n", "n", "fail"]
        results = [part["codeExecutionResult"] for part in parts[2:7:2]]
        assert [each["id"] for each in codes] == [each["id"] for each in results]
        assert len({each["id"] for each in codes}) == 3
        assert [(each["outcome"], each["output"]) for each in results] == [
            ("OUTCOME_FAILED", "n 1\né"),
            ("OUTCOME_FAILED", "n 2\né"),
            ("OUTCOME_FAILED", "code execution is unavailable"),
        ]
        model, user = google_go_on(parts, left_out)
        apart = [{"role": "model", "parts": [part]} for part in model["parts"]]
        async with starting_proxies(checkpoint, rendering, tmp_path) as start:
            again = await start(engine=engine, tools=BACKEND)
            again.answers(script())
            moved = replace(session, base_url=session.base_url.replace(proxy.url, again.url))
            said = await generated(again, moved, google_body(*apart, user), how)
            assert said == [{"text": "Bye."}]
            _, turns = await again.record(moved)
    assert_one_path(turns, 5)
    decode = rendering.tokenizer.decode
    assert '"code_execution"' in decode(turns[0].prompt_ids.tolist())
    assert "bash_code_execution" not in decode(turns[0].prompt_ids.tolist())
    assert '"return_code":3' in decode(turns[1].prompt_ids.tolist())
    assert not any("return_code" in decode(turn.sampled_ids.tolist()) for turn in turns)
    assert [each.language for each in ran] == ["python"] * 3


@pytest.mark.parametrize(
    ("source", "outcome"),
    [
        ("print", "OUTCOME_OK"),
        ("fail", "OUTCOME_FAILED"),
        ("slow", "OUTCOME_DEADLINE_EXCEEDED"),
        ("", "OUTCOME_FAILED"),
    ],
)
async def test_outcome_of_generate_content_is_the_codes(
    start_proxy: StartProxy, source: str, outcome: str
) -> None:
    proxy = await start_proxy(tools={"code_execution": f"{__name__}:run_or_print"})
    proxy.answers(script(called(source)))
    session = await proxy.session()
    parts = await generated(proxy, session, google_body())
    code, result, last = parts
    assert code["executableCode"]["language"] == "PYTHON"
    assert result["codeExecutionResult"]["outcome"] == outcome
    assert last == {"text": "Done."}
    back = google_go_on(parts, ("id",))
    assert await generated(proxy, session, google_body(*back)) == [{"text": "Bye."}]
    assert_one_path((await proxy.record(session))[1], 3)


async def run_or_print(execution: Execution, tool: Mapping[str, Any]) -> dict[str, Any]:
    assert tool == {"codeExecution": {}}
    return {"stdout": "2\n"} if execution.code == "print" else await run(execution, tool)


@pytest.mark.parametrize("how", HOW)
async def test_call_of_generate_content_without_a_backend_gets_an_error(
    start_proxy: StartProxy, how: str
) -> None:
    proxy = await start_proxy()
    proxy.answers(script(called("1")))
    session = await proxy.session()
    parts = await generated(proxy, session, google_body(), how)
    result = parts[1]["codeExecutionResult"]
    assert (result["outcome"], result["output"]) == (
        "OUTCOME_FAILED",
        "code execution is unavailable",
    )
    await generated(proxy, session, google_body(*google_go_on(parts)), how)
    _, turns = await proxy.record(session)
    assert_one_path(turns, 3)
    assert "code_execution" not in proxy.rendering.tokenizer.decode(turns[0].prompt_ids.tolist())
    await proxy.control.complete(session.trial_id)
    events = [event async for event in proxy.control.events(session.trial_id)]
    assert [e["kind"] for e in events].count("tools_left_out") == 1


@pytest.mark.parametrize("left_out", [(), ("id",)])
@pytest.mark.parametrize("how", HOW)
async def test_two_codes_beside_a_function_of_generate_content(
    start_proxy: StartProxy, how: str, left_out: tuple[str, ...]
) -> None:
    proxy = await start_proxy(tools=BACKEND)
    proxy.answers(
        lambda prompt: (
            "Done." if "file 1" in prompt else "\n".join([called("a"), SHELL_CALL, called("b")])
        )
    )
    session = await proxy.session()
    parts = await generated(proxy, session, google_body(), how)
    kinds = [next(iter(part)) for part in parts]
    results = ["codeExecutionResult"] * 2
    assert kinds == ["executableCode", "functionCall", "executableCode", *results]
    assert [part["codeExecutionResult"]["output"] for part in parts[3:]] == ["a 1\né", "b 2\né"]
    model, _ = google_go_on(parts, left_out)
    answered = {"functionResponse": {"name": "shell", "response": {"output": "file 1"}}}
    body = google_body(model, {"role": "user", "parts": [answered]})
    assert await generated(proxy, session, body, how) == [{"text": "Done."}]
    _, turns = await proxy.record(session)
    assert_one_path(turns, 2)
    assert len(ran) == 2


async def test_candidates_of_generate_content_run_their_own_code(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(tools=BACKEND)
    proxy.answers(script(called("n")))
    session = await proxy.session()
    body = google_body(generationConfig={"candidateCount": 2})
    status, data = await ask_google(proxy, session, body)
    assert status == 200, data
    candidates = orjson.loads(data)["candidates"]
    outputs = [each["content"]["parts"][1]["codeExecutionResult"]["output"] for each in candidates]
    assert sorted(outputs) == ["n 1\né", "n 2\né"]
    for candidate in candidates:
        back = google_go_on(candidate["content"]["parts"])
        assert await generated(proxy, session, google_body(*back)) == [{"text": "Bye."}]
    _, turns = await proxy.record(session)
    assert [turn.fork_cause for turn in turns[-2:]] == [None, None]


async def test_googles_code_alone_is_offered_and_an_agents_function_of_that_name_is_its_own(
    start_proxy: StartProxy,
) -> None:
    proxy = await start_proxy(tools=BACKEND)
    proxy.answers(script(called("1")))
    alone = google_body() | {"tools": [{"code_execution": {}}]}
    parts = await generated(proxy, await proxy.session(), alone)
    assert [next(iter(part)) for part in parts] == ["executableCode", "codeExecutionResult", "text"]
    own = {"name": "code_execution", "parameters": {"type": "OBJECT"}}
    body = google_body() | {"tools": [{"functionDeclarations": [own]}, {"codeExecution": {}}]}
    (part,) = await generated(proxy, await proxy.session(), body)
    assert part["functionCall"]["name"] == "code_execution"
    assert len(ran) == 1


async def test_code_interpreter_can_be_required(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(tools=BACKEND)
    proxy.answers(script(called("1")))
    body = responses_body() | {"tool_choice": {"type": "code_interpreter"}}
    answer = await ask(proxy, await proxy.session(), "responses", body)
    assert [item["type"] for item in answer["output"]] == ["code_interpreter_call", "message"]


async def test_backend_of_the_documentation_runs_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a `docker` that runs the program here."""
    page = (ROOT / "docs/notes/adding_a_part.md").read_text()
    section = page.partition("## A tool of a provider")[2]
    scope: dict[str, Any] = {}
    exec(section.partition("```python\n")[2].partition("```")[0], scope)
    docker = tmp_path / "docker"
    docker.write_text('#!/bin/sh\nwhile [ "$1" != timeout ]; do shift; done\nexec "$@"\n')
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    python = await scope["run"](Execution("python", "print(1 + 1); 1 / 0", "s", "0_a"), {})
    assert (python["stdout"], python["return_code"]) == ("2\n", 1)
    assert "ZeroDivisionError" in python["stderr"]
    bash = await scope["run"](Execution("bash", "echo é; exit 3", "s", "0_b"), {})
    assert bash == {"stdout": "é\n", "stderr": "", "return_code": 3}
