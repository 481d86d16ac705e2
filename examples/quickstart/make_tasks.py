"""Writes train.jsonl and heldout.jsonl: `python -m examples.quickstart.make_tasks`.

Invariant: no order is in both files.
"""

import json
import random
from pathlib import Path

from examples.quickstart.shop import new_question

_TRAIN, _HELDOUT = 512, 64
_SEED = 20


def main() -> None:
    rng = random.Random(_SEED)
    tasks: dict[str, dict[str, object]] = {}
    while len(tasks) < _TRAIN + _HELDOUT:
        task = new_question(rng)
        tasks.setdefault(str(task["prompt"]), task)
    # There are few orders of a single thing, so they are divided between both files.
    listed = list(tasks.values())
    rng.shuffle(listed)
    _write("heldout", listed[:_HELDOUT])
    _write("train", listed[_HELDOUT:])


def _write(name: str, tasks: list[dict[str, object]]) -> None:
    lines = [json.dumps({"task_id": f"{name}-{i}", **task}) for i, task in enumerate(tasks)]
    Path(__file__).with_name(f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
