"""Writes train.jsonl and eval.jsonl: `python -m benchmarks.rewind.make_tasks`.

There are few houses, so that each is seen in every second step: prefix sampling begins with
recorded turns of the same task. Evaluations are walks through the same houses, each of which is
listed several times in `eval.jsonl`.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from benchmarks.rewind.house import new_house

_HOUSES, _WALKS = 8, 4
_SEED = 3


def main() -> None:
    rng = random.Random(_SEED)
    houses = [new_house(rng) for _ in range(_HOUSES)]
    _write("train", houses)
    _write("eval", houses * _WALKS)


def _write(name: str, houses: list[dict[str, Any]]) -> None:
    lines = [json.dumps({"task_id": f"{name}-{i}", **house}) for i, house in enumerate(houses)]
    Path(__file__).with_name(f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
