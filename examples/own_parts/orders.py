"""A task source without an end: the quickstart's orders (`data.train_sources.NAME.function`).

It is called once per epoch. The same seed must yield the same tasks, and the settings are keyword
parameters.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from examples.quickstart.shop import new_question


def orders(seed: int, most_things: int = 2) -> Iterator[dict[str, Any]]:
    drawn = random.Random(seed)
    while True:
        task = new_question(drawn)
        things = len(task["order"])
        if things <= most_things:
            yield {**task, "level": things}
