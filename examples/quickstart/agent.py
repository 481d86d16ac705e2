"""The agent: an ordinary program that uses the OpenAI SDK and contains nothing about training.

It reads its model and server from the environment (OPENAI_BASE_URL, OPENAI_API_KEY, AGENT_MODEL)
and its task from a file (TASK_FILE). It serves the customer with two tools and writes `answer.txt`.
`run` is the same agent as a function for the `python` launcher, which starts no new interpreter.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openai import OpenAI
from shop import SYSTEM, TOOLS, calculate, price, right_answer

if TYPE_CHECKING:
    from agent_loop.launchers.calls import AgentCall

# Three prices, a calculation and the answer need five turns; more turns do not help the policy.
MAX_TURNS = 7


def main() -> None:
    task = json.loads(Path(os.environ["TASK_FILE"]).read_text())
    answer = serve(OpenAI(), os.environ["AGENT_MODEL"], task)
    if answer is not None:
        Path("answer.txt").write_text(answer)


def run(call: AgentCall) -> float:
    """The reward: 1.0 if the answer is right, else 0.0."""
    client = OpenAI(base_url=call.base_url, api_key=call.api_key)
    answer = serve(client, call.model, call.task)
    wanted = right_answer(call.task["order"], call.task["prices"])
    return float(answer is not None and answer.strip() == wanted)


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
