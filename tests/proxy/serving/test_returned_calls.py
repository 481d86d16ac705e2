"""Calls that an agent's client has tidied continue the recorded path, in every dialect."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import orjson
import pytest

from proxy.client import SessionHandle
from proxy.records import ForkCause
from proxy.serving import returned_calls
from tests.proxy.conftest import RunningProxy, StartProxy

SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "all": {"type": "boolean", "default": False},
        "line": {"type": "integer"},
    },
    "required": ["path"],
}
Change = Callable[[dict[str, Any]], dict[str, Any]]


def with_default(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"all": False, **arguments}


def call(name: str = "edit", **arguments: Any) -> str:
    made = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{made}\n</tool_call>"


class Agent:
    """An agent that changes the arguments of its calls before it repeats them."""

    def __init__(self, proxy: RunningProxy, session: SessionHandle, change: Change) -> None:
        self.proxy, self.session, self.change = proxy, session, change
        self.history: list[Any] = [{"role": "user", "content": "Edit the file."}]

    async def turn(self) -> None:
        """One call of the model; its tool calls get results."""
        raise NotImplementedError

    async def ask(self, route: str, **body: Any) -> Any:
        status, reply = await self.proxy.post(self.session, route, {"max_tokens": 2000, **body})
        assert status == 200, reply
        return reply


class ChatAgent(Agent):
    async def turn(self) -> None:
        function = {"name": "edit", "parameters": SCHEMA}
        tools = [{"type": "function", "function": function}]
        reply = await self.ask("chat/completions", messages=self.history, tools=tools)
        message = reply["choices"][0]["message"]
        self.history.append(message)
        for each in message["tool_calls"]:
            changed = self.change(json.loads(each["function"]["arguments"], strict=False))
            each["function"]["arguments"] = json.dumps(changed)
            self.history.append({"role": "tool", "content": "ok", "tool_call_id": each["id"]})


class MessagesAgent(Agent):
    async def turn(self) -> None:
        tools = [{"name": "edit", "input_schema": SCHEMA}]
        reply = await self.ask("messages", messages=self.history, tools=tools)
        results = []
        for block in reply["content"]:
            if block["type"] == "tool_use":
                block["input"] = self.change(block["input"])
                result = {"type": "tool_result", "tool_use_id": block["id"], "content": "ok"}
                results.append(result)
        self.history += [
            {"role": "assistant", "content": reply["content"]},
            {"role": "user", "content": results},
        ]


class ResponsesAgent(Agent):
    async def turn(self) -> None:
        tools = [{"type": "function", "name": "edit", "parameters": SCHEMA}]
        reply = await self.ask("responses", input=self.history, tools=tools)
        for item in reply["output"]:
            self.history.append(item)
            if item["type"] == "function_call":
                item["arguments"] = json.dumps(
                    self.change(json.loads(item["arguments"], strict=False))
                )
                output = {"type": "function_call_output", "output": "ok"}
                self.history.append({**output, "call_id": item["call_id"]})


AGENTS = [ChatAgent, MessagesAgent, ResponsesAgent]


async def forks(proxy: RunningProxy, session: SessionHandle) -> list[ForkCause | None]:
    _, turns = await proxy.record(session)
    return [turn.fork_cause for turn in turns]


async def changes_of(proxy: RunningProxy, session: SessionHandle) -> list[list[str]]:
    await proxy.control.complete(session.trial_id)
    events = [each async for each in proxy.control.events(session.trial_id)]
    tidied = [each for each in events if each["kind"] == "tidied"]
    return [made["changes"] for event in tidied for made in event["calls"]]


@pytest.mark.parametrize("make", AGENTS)
async def test_tidied_calls_extend_and_the_model_sees_its_own(
    proxy: RunningProxy, make: type[Agent]
) -> None:
    proxy.answers("Now.\n" + call(path="a b  \n", line="3") + call(path="c"))
    session = await proxy.session()

    def tidy(arguments: dict[str, Any]) -> dict[str, Any]:
        arguments["path"] = arguments["path"].replace("  \n", "\n")
        return with_default(arguments | ({"line": 3} if "line" in arguments else {}))

    agent = make(proxy, session, tidy)
    for _ in range(4):
        await agent.turn()
    assert await forks(proxy, session) == [None] * 4
    prompt = proxy.rendering.tokenizer.decode(proxy.engine.calls[-1].prompt_ids)
    assert prompt.count('"line": "3"') == 3
    assert '"all"' not in prompt.partition("Edit the file.")[2]
    changes = ["all: default added", "line: text became a number", "path: blanks trimmed"]
    assert await changes_of(proxy, session) == [changes, ["all: default added"]] * 3


@pytest.mark.parametrize("make", AGENTS)
async def test_a_restarted_proxy_reads_the_calls_from_its_store(
    start_proxy: StartProxy, make: type[Agent]
) -> None:
    first = await start_proxy()
    first.answers(call(path="a"))
    session = await first.session()
    agent = make(first, session, with_default)
    for _ in range(3):
        await agent.turn()
    second = await start_proxy(engine=first.engine)
    second.answers(call(path="a"))
    agent.proxy = second
    url = f"{second.url}/{session.trial_id}"
    agent.session = replace(session, base_url=f"{url}/v1", anthropic_base_url=url)
    await agent.turn()
    assert await forks(second, agent.session) == [None] * 4


async def test_calls_beyond_the_memory_of_a_session_are_read_again(
    proxy: RunningProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(returned_calls, "KEPT_BYTES", 1000)
    proxy.answers(call(path="a" * 300))
    session = await proxy.session()
    agent = ChatAgent(proxy, session, with_default)
    for _ in range(6):
        await agent.turn()
    assert await forks(proxy, session) == [None] * 6


@pytest.mark.parametrize("make", AGENTS)
@pytest.mark.parametrize("times", [1, 3])
async def test_a_changed_call_has_one_cause_wherever_it_stands(
    proxy: RunningProxy, make: type[Agent], times: int
) -> None:
    proxy.answers(call(path="a"))
    session = await proxy.session()
    agent = make(proxy, session, lambda arguments: arguments)
    for _ in range(times):
        await agent.turn()
    agent.change = lambda arguments: {**arguments, "all": True}
    await agent.turn()
    await agent.turn()
    assert await forks(proxy, session) == [None] * (times + 1) + [ForkCause.TOOL_ARGUMENTS]


async def test_a_call_of_another_session_or_id_is_not_replaced(proxy: RunningProxy) -> None:
    proxy.answers(call(path="a"))
    session = await proxy.session()
    agent = ChatAgent(proxy, session, with_default)
    await agent.turn()
    made = agent.history[1]["tool_calls"][0]
    made["id"] = agent.history[2]["tool_call_id"] = "call_of_the_agent"
    await agent.turn()
    assert await forks(proxy, session) == [None, ForkCause.TOOL_ARGUMENTS]


@pytest.mark.parametrize("stream", [True, False])
async def test_malformed_calls_that_the_agent_quotes_extend(
    proxy: RunningProxy, stream: bool
) -> None:
    """As Claude Code does: it puts what it could not read into an object."""
    proxy.answers('<tool_call>\n{"name": "edit", "arguments": {"path": "a\\x"}}\n</tool_call>')
    session = await proxy.session()
    history: list[Any] = [{"role": "user", "content": "Edit."}]
    tools = [{"name": "edit", "input_schema": SCHEMA}]
    for _ in range(3):
        body = {"max_tokens": 200, "messages": history, "tools": tools, "stream": stream}
        blocks: dict[int, Any] = {}
        if stream:
            for event in await proxy.events(session, "messages", body):
                data = orjson.loads(event.partition(b"data: ")[2])
                if data["type"] == "content_block_start":
                    blocks[data["index"]] = {**data["content_block"], "raw": ""}
                elif data["type"] == "content_block_delta":
                    delta = data["delta"]
                    blocks[data["index"]]["raw"] += delta.get("partial_json", delta.get("text"))
        else:
            _, reply = await proxy.post(session, "messages", body)
            blocks = dict(enumerate(reply["content"]))
        content, results = [], []
        for block in blocks.values():
            raw = block.pop("raw", None)
            if block["type"] == "tool_use":
                quoted = {"__unparsedToolInput": {"raw": raw, "len": len(raw)}} if raw else {}
                content.append({**block, "input": quoted or block["input"]})
                results.append({"type": "tool_result", "tool_use_id": block["id"], "content": "?"})
            else:
                content.append({**block, "text": raw or block["text"]})
        history += [
            {"role": "assistant", "content": content},
            {"role": "user", "content": results or "Again."},
        ]
    assert await forks(proxy, session) == [None] * 3


async def test_counting_sees_the_recorded_calls(proxy: RunningProxy) -> None:
    proxy.answers(call(path="a"))
    session = await proxy.session()
    agent = MessagesAgent(proxy, session, with_default)
    await agent.turn()
    await agent.turn()
    tools = [{"name": "edit", "input_schema": SCHEMA}]
    body = {"messages": agent.history, "tools": tools}
    _, counted = await proxy.post(session, "messages/count_tokens", body)
    await agent.turn()
    _, turns = await proxy.record(session)
    assert counted["input_tokens"] == turns[-1].prompt_tokens


@pytest.mark.parametrize("make", AGENTS)
async def test_line_breaks_as_they_are_in_a_string_are_serialised_again(
    proxy: RunningProxy, make: type[Agent]
) -> None:
    """LangChain reads such arguments, which are not JSON, and sends JSON."""
    made = '{"name": "edit", "arguments": {"path": "a\n\tb", "line": 3}}'
    proxy.answers(f"<tool_call>\n{made}\n</tool_call>")
    session = await proxy.session()
    agent = make(proxy, session, lambda arguments: dict(reversed(arguments.items())))
    for _ in range(3):
        await agent.turn()
    assert await forks(proxy, session) == [None] * 3
