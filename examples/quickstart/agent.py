"""The agent: an ordinary program that uses the OpenAI SDK and contains nothing about training.

It reads its model and server from the environment (OPENAI_BASE_URL, OPENAI_API_KEY, AGENT_MODEL)
and its task from a file (TASK_FILE). It serves the customer with two tools and writes `answer.txt`.

As a program (`main`), each trial starts an interpreter, imports the SDK and makes a client: 1.5 s
of processor time, for an agent that works for 0.05 s. As a function (`run`, for the `python`
launcher), this is done once, and each trial is a fork of that process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openai import OpenAI
from shop import SYSTEM, TOOLS, calculate, price

if TYPE_CHECKING:
    from agent_loop.launchers.calls import AgentCall

# Three prices, a calculation and the answer need five turns; more turns do not help the policy.
MAX_TURNS = 7

_CLIENT = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://each-trial-has-its-own"),
    api_key=os.environ.get("OPENAI_API_KEY", "each-trial-has-its-own"),
)
_CLIENT.chat.completions  # noqa: B018 (the SDK imports this part when it is first used)


def main() -> None:
    """The agent as a program, for the `command` launcher."""
    task = json.loads(Path(os.environ["TASK_FILE"]).read_text(encoding="utf-8"))
    answer = serve(_CLIENT, os.environ["AGENT_MODEL"], task)
    if answer is not None:
        Path("answer.txt").write_text(answer, encoding="utf-8")


def run(call: AgentCall) -> None:
    """The same agent as a function, for the `python` launcher."""
    client = _CLIENT.with_options(base_url=call.base_url, api_key=call.api_key)
    answer = serve(client, call.model, call.task)
    if answer is not None:
        (call.workspace / "answer.txt").write_text(answer, encoding="utf-8")


def serve(client: OpenAI, model: str, task: Mapping[str, Any]) -> str | None:
    """The answer to the customer; None if the agent did not answer within `MAX_TURNS`."""
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": task["prompt"]},
    ]
    for _ in range(MAX_TURNS):
        answer = client.chat.completions.create(
            model=model, messages=messages, tools=TOOLS, max_tokens=96
        )
        message = answer.choices[0].message
        print(message.to_json(indent=None, exclude_none=True))
        messages.append(message.to_dict(exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            result = use(call.function.name, call.function.arguments, task["prices"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return None


def use(tool: str, arguments: str, prices: dict[str, int]) -> str:
    """The result of a tool call; an error message if the call is wrong."""
    try:
        given = json.loads(arguments)
        if tool == "price":
            return price(prices, str(given["item"]))
        if tool == "calculate":
            return calculate(str(given["expression"]))
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        return f"error: {error}"
    return f"error: no tool {tool}"


if __name__ == "__main__":
    main()
