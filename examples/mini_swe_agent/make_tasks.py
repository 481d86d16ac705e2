"""Writes train.jsonl, heldout.jsonl and workspace/: `python -m examples.mini_swe_agent.make_tasks`.

Invariant: no task is in both files.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from examples.mini_swe_agent.shell_tasks import SOURCES, WORKSPACE, new_task

_TRAIN, _HELDOUT = 200, 40
_SEED = 7


def main() -> None:
    rng = random.Random(_SEED)
    for name in SOURCES:
        numbers = [str(rng.randint(10, 99)) for _ in range(rng.randint(3, 9))]
        (WORKSPACE / f"{name}.txt").write_text("\n".join(numbers) + "\n", encoding="utf-8")
    tasks: dict[str, dict[str, str]] = {}
    while len(tasks) < _TRAIN + _HELDOUT:
        task = new_task(rng)
        tasks.setdefault(task["prompt"], task)
    listed = list(tasks.values())
    _write("heldout", listed[:_HELDOUT])
    _write("train", listed[_HELDOUT:])


def _write(name: str, tasks: list[dict[str, str]]) -> None:
    lines = [json.dumps({"task_id": f"{name}-{i}", **task}) for i, task in enumerate(tasks)]
    Path(__file__).with_name(f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
