"""An endless task source, as `data.train_sources.NAME.function`.

The function is called once per epoch. The same seed must yield the same tasks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any


def sums(seed: int, digits: int = 2) -> Iterator[dict[str, Any]]:
    drawn = random.Random(seed)
    while True:
        a, b = (drawn.randrange(10**digits) for _ in range(2))
        yield {"prompt": f"What is {a} + {b}?", "answer": str(a + b)}
