"""The scripted expert whose transcripts the warm-up trains on. It makes mistakes on purpose.

It always copies names and numbers correctly, because a small model learns that slowly by
reinforcement. In each situation the right step stays the most likely one, so that reinforcement
learning can find it. With all mistakes together, about four of ten orders are right.
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

# Probability of each mistake in the situations where it can be made.
_FORGETS_THING = 0.35
_ADDS_COUNTS = 0.25
_ANSWERS_PRICE = 0.2
_SKIPS_CALCULATION = 0.1


def transcript(rng: random.Random) -> Transcript:
    """One conversation about one order, possibly with mistakes."""
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
    """The requested name and its price, for each thing of the order in turn."""
    seen: list[tuple[str, int]] = []
    for thing in order:
        if seen and rng.random() < _FORGETS_THING:
            break
        _use(messages, "price", {"item": thing}, price(prices, thing))
        seen.append((thing, prices[thing]))
    return seen


def _expression(order: Order, seen: list[tuple[str, int]], rng: random.Random) -> str:
    operator = "+" if rng.random() < _ADDS_COUNTS else "*"
    # `seen` is shorter if a thing was forgotten.
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
