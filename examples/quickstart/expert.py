"""The scripted expert of the warm-up: it knows the way, and is careless on it.

It copies names and numbers rightly, for that is what a small model learns slowly by trial and
error. Every mistake leaves the right step as the most likely one, so that reinforcement learning
can find it; together they leave about four of ten orders right.
"""

from __future__ import annotations

import json
import random
from typing import Any

from examples.quickstart.shop import (
    SYSTEM,
    TOOLS,
    Order,
    calculate,
    new_question,
    price,
    price_line,
)
from examples.starter_model.transcripts import Message, Transcript

# Chance of each mistake, where it can be made.
_FORGETS_THING = 0.35
_ADDS_COUNTS = 0.25
_ANSWERS_PRICE = 0.2
_SKIPS_CALCULATION = 0.1


def transcript(rng: random.Random) -> Transcript:
    """One careless conversation about one order."""
    task = new_question(rng)
    messages: list[Message] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": task["prompt"]},
    ]
    seen = _look_up(messages, task["order"], task["prices"], rng)
    asked, found = rng.choice(seen)
    answer = price_line(asked, found)
    if rng.random() >= _SKIPS_CALCULATION:
        expression = _expression(task["order"], seen, rng)
        result = calculate(expression)
        _use(messages, "calculate", {"expression": expression}, result)
        if rng.random() >= _ANSWERS_PRICE:
            answer = result
    messages.append({"role": "assistant", "content": answer})
    return Transcript(messages, TOOLS)


def _look_up(
    messages: list[Message], order: Order, prices: dict[str, int], rng: random.Random
) -> list[tuple[str, int]]:
    """What was asked for and its price, for the order's things one after the other."""
    seen: list[tuple[str, int]] = []
    for thing in order:
        if seen and rng.random() < _FORGETS_THING:
            break
        _use(messages, "price", {"item": thing}, price(prices, thing))
        seen.append((thing, prices[thing]))
    return seen


def _expression(order: Order, seen: list[tuple[str, int]], rng: random.Random) -> str:
    operator = "+" if rng.random() < _ADDS_COUNTS else "*"
    # `seen` is shorter where a thing was forgotten.
    pairs = zip(order.values(), seen, strict=False)
    return "+".join(f"{n}{operator}{each}" for n, (_, each) in pairs)


def _use(messages: list[Message], name: str, arguments: dict[str, Any], result: str) -> None:
    call_id = f"call_{len(messages)}"
    function = {"name": name, "arguments": json.dumps(arguments)}
    messages.append(
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": call_id, "type": "function", "function": function}],
        }
    )
    messages.append({"role": "tool", "tool_call_id": call_id, "content": result})
