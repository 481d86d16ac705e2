"""The scripted expert of the warm-up: it knows the way, and is careless at every step of it.

Every mistake leaves the right step as the most likely one, so that reinforcement learning can
find it; together they leave about a third of the orders right.
"""

from __future__ import annotations

import json
import random
from typing import Any

from examples.quickstart.shop import (
    GOODS,
    SYSTEM,
    TOOLS,
    Order,
    calculate,
    new_question,
    price,
)
from examples.starter_model.transcripts import Message, Transcript

# Chance of each mistake, where it can be made.
_GUESSES_TOTAL = 0.15
_FORGETS_THING = 0.20
_WRONG_THING = 0.05
_WRONG_COUNT = 0.10
_ADDS_COUNT = 0.10
_ANSWERS_PRICE = 0.12
_ASKS_AGAIN = 0.08


def transcript(rng: random.Random) -> Transcript:
    """One careless conversation about one order."""
    task = new_question(rng)
    messages: list[Message] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": task["prompt"]},
    ]
    seen = _look_up(messages, task["order"], task["prices"], rng)
    if rng.random() < _GUESSES_TOTAL:
        result = str(rng.randint(20, 999))
    else:
        expression = _expression(task["order"], seen, rng)
        result = calculate(expression)
        _use(messages, "calculate", {"expression": expression}, result)
        if rng.random() < _ANSWERS_PRICE:
            result = str(rng.choice(seen))
    messages.append({"role": "assistant", "content": result})
    return Transcript(messages, TOOLS)


def _look_up(
    messages: list[Message], order: Order, prices: dict[str, int], rng: random.Random
) -> list[int]:
    """The prices found, for the order's things one after the other."""
    seen: list[int] = []
    for thing in order:
        if seen and rng.random() < _FORGETS_THING:
            break
        asked = rng.choice(GOODS) if rng.random() < _WRONG_THING else thing
        _use(messages, "price", {"item": asked}, price(prices, asked))
        seen.append(prices[asked])
        if rng.random() < _ASKS_AGAIN:
            _use(messages, "price", {"item": asked}, price(prices, asked))
    return seen


def _expression(order: Order, seen: list[int], rng: random.Random) -> str:
    terms = []
    for count, each in zip(order.values(), seen, strict=False):
        said = rng.randint(2, 9) if rng.random() < _WRONG_COUNT else count
        terms.append(f"{said}{'+' if rng.random() < _ADDS_COUNT else '*'}{each}")
    return "+".join(terms)


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
