"""The shop assistant with two models: a planner looks up the prices, and a coder does the rest.

Both are model names on the same server. The program knows nothing about training; the file
planner_coder.yaml says which policy answers for each name, and that both are trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agent import _CLIENT, MAX_TURNS, use
from openai import OpenAI
from shop import SYSTEM, TOOLS

if TYPE_CHECKING:
    from agent_loop.launchers.calls import AgentCall


def run(call: AgentCall) -> None:
    """The agent as a function, for the `python` launcher."""
    client = _CLIENT.with_options(base_url=call.base_url, api_key=call.api_key)
    answer = serve(client, call.task)
    if answer is not None:
        (call.workspace / "answer.txt").write_text(answer, encoding="utf-8")


def serve(client: OpenAI, task: Mapping[str, Any]) -> str | None:
    """The answer to the customer; None if there is none within `MAX_TURNS`."""
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": task["prompt"]},
    ]
    looked_up = 0
    for _ in range(MAX_TURNS):
        model = "planner" if looked_up < len(task["order"]) else "coder"
        answer = client.chat.completions.create(
            model=model, messages=messages, tools=TOOLS, max_tokens=96
        )
        message = answer.choices[0].message
        print(model, message.to_json(indent=None, exclude_none=True))
        messages.append(message.to_dict(exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            looked_up += call.function.name == "price"
            result = use(call.function.name, call.function.arguments, task["prices"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return None
