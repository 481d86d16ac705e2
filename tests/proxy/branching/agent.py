"""A small agent on Chat Completions with tools, and a model that calls them, for tests."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson

from proxy.client import SessionHandle
from tests.proxy.conftest import RunningProxy

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "shell",
            "description": "Runs a command.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
        },
    }
]
STEPS = 5
"""Calls of the model until it says that it is done."""
Tool = Callable[[int], str]


def plays(prompt: str) -> str:
    """The model's answer: a numbered command for each result so far, then a text."""
    done = prompt.count("<tool_response>\n")
    if done + 1 >= STEPS:
        return f"<think>\nEnough.\n</think>\n\nDone after {done} steps."
    arguments = orjson.dumps({"command": f"step {done}"}).decode()
    return f'Step {done}.\n<tool_call>\n{{"name": "shell", "arguments": {arguments}}}\n</tool_call>'


def result(step: int) -> str:
    return f"result of step {step}"


@dataclass
class SmallAgent:
    """Runs in a session until the model calls no tool. `tool` gives the results of its calls."""

    proxy: RunningProxy
    session: SessionHandle
    tool: Tool = result
    system: str = "Use the shell."
    stream: bool = False
    messages: list[dict[str, Any]] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)

    async def run(self, calls: int = 100) -> tuple[int, Any]:
        """The status and the body of the last call."""
        if not self.messages:
            self.messages = [
                {"role": "system", "content": self.system},
                {"role": "user", "content": "Do the task."},
            ]
        status, body = 200, None
        for _ in range(calls):
            status, body = await self.ask()
            if status != 200:
                return status, body
            self.take(body["choices"][0]["message"])
            if not body["choices"][0]["message"].get("tool_calls"):
                break
        return status, body

    async def ask(self, **headers: str) -> tuple[int, Any]:
        body = {"model": "m", "messages": self.messages, "tools": TOOLS, "stream": False}
        return await self.proxy.post(self.session, "chat/completions", body, **headers)

    def take(self, message: dict[str, Any]) -> None:
        """Adds the answer, without its reasoning, and the results of its calls."""
        self.answers.append(message)
        said = ("role", "content", "tool_calls")
        self.messages.append({key: value for key, value in message.items() if key in said})
        for call in message.get("tool_calls") or ():
            found = re.search(r"step (\d+)", call["function"]["arguments"])
            content = self.tool(int(found[1]) if found else -1)
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})


async def record(proxy: RunningProxy, **session: Any) -> SmallAgent:
    """An agent that has run to its end in a new session, which is completed."""
    proxy.answers(plays)
    agent = SmallAgent(proxy, await proxy.session(**session))
    status, _ = await agent.run()
    assert status == 200
    await proxy.control.complete(agent.session.trial_id)
    return agent
