"""Writes train.jsonl and heldout.jsonl: `python -m benchmarks.rewind.make_tasks`.

Invariant: no house is in both files. There are few houses to train in, so that each is seen again
soon: prefix sampling begins with recorded turns of the same task.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from benchmarks.rewind.house import new_house

_TRAIN, _HELDOUT = 8, 32
_SEED = 3


def main() -> None:
    rng = random.Random(_SEED)
    listed = [new_house(rng) for _ in range(_TRAIN + _HELDOUT)]
    for name, houses in (("train", listed[:_TRAIN]), ("heldout", listed[_TRAIN:])):
        lines = [json.dumps({"task_id": f"{name}-{i}", **house}) for i, house in enumerate(houses)]
        Path(__file__).with_name(f"{name}.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
