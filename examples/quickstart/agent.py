"""The agent: an ordinary program on the OpenAI SDK that has never heard of a trainer.

It is told its model and server by the environment (OPENAI_BASE_URL, OPENAI_API_KEY, AGENT_MODEL)
and its task by a file (TASK_FILE), serves the customer with two tools, and writes `answer.txt`.
"""

import json
import os
from pathlib import Path

from openai import OpenAI
from shop import SYSTEM, TOOLS, calculate, price

# Three prices, a calculation and the answer make five; a policy that still calls tools is lost.
MAX_TURNS = 7


def main() -> None:
    task = json.loads(Path(os.environ["TASK_FILE"]).read_text())
    client = OpenAI()
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": task["prompt"]},
    ]
    for _ in range(MAX_TURNS):
        answer = client.chat.completions.create(
            model=os.environ["AGENT_MODEL"], messages=messages, tools=TOOLS, max_tokens=96
        )
        message = answer.choices[0].message
        print(message.to_json(indent=None, exclude_none=True))
        messages.append(message.to_dict(exclude_none=True))
        if not message.tool_calls:
            Path("answer.txt").write_text(message.content or "")
            return
        for call in message.tool_calls:
            result = use(call.function.name, call.function.arguments, task["prices"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def use(tool: str, arguments: str, prices: dict[str, int]) -> str:
    """What a tool answers; its complaint, if it was called wrongly."""
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
