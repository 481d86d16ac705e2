"""The shop: its goods, tools and questions, as agent, expert and verifier use them.

It knows nothing about training, and imports only the standard library.
"""

from __future__ import annotations

import random
import re
from typing import Any

GOODS = (
    "apples",
    "books",
    "candles",
    "drums",
    "eggs",
    "forks",
    "gloves",
    "hats",
    "jars",
    "kites",
    "lamps",
    "mugs",
    "nails",
    "onions",
    "pens",
    "ropes",
)
SYSTEM = (
    "You serve in a shop. Look up the price of each thing, calculate the total, "
    "and answer with the total's line alone."
)
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "price",
            "description": "Price of one thing",
            "parameters": {
                "type": "object",
                "properties": {"item": {"type": "string"}},
                "required": ["item"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Value of a sum of products",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    },
]
_SUM_OF_PRODUCTS = re.compile(r"\d{1,4}(\*\d{1,4})?(\+\d{1,4}(\*\d{1,4})?)*")

Order = dict[str, int]
"""Thing → number of pieces."""


def new_question(rng: random.Random) -> dict[str, Any]:
    """A task's data: the `prompt`, the `order` it asks about and the shop's `prices`."""
    things = rng.sample(GOODS, rng.choice((1, 2, 2)))
    order = {thing: rng.randint(2, 9) for thing in things}
    return {
        "prompt": question(order),
        "order": order,
        "prices": {thing: rng.randint(3, 9) for thing in GOODS},
    }


def question(order: Order) -> str:
    """The order in words."""
    lines = [f"{thing}: {count}" for thing, count in order.items()]
    return "\n".join(["What does this order cost?", *lines])


def total_line(total: int) -> str:
    """A total in the shop's notation; the `calculate` tool and the right answer use it."""
    return f"total: {total}"


def price_line(item: str, each: int) -> str:
    """A price in the shop's notation."""
    return f"{item}: {each}"


def right_answer(order: Order, prices: dict[str, int]) -> str:
    """The right answer to an order."""
    return total_line(sum(count * prices[thing] for thing, count in order.items()))


def price(prices: dict[str, int], item: str) -> str:
    """The result of the `price` tool."""
    return price_line(item, prices[item]) if item in prices else f"error: no {item} here"


def calculate(expression: str) -> str:
    """The result of the `calculate` tool, which accepts only sums of products of whole numbers."""
    compact = expression.replace(" ", "")
    if not _SUM_OF_PRODUCTS.fullmatch(compact):
        return "error: not a sum of products"
    products = [[int(n) for n in term.split("*")] for term in compact.split("+")]
    return total_line(sum(p[0] * (p[1] if len(p) > 1 else 1) for p in products))
