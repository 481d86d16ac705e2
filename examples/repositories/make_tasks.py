"""Writes folders/, train.jsonl and heldout.jsonl: `python -m examples.repositories.make_tasks`.

Invariant: the repositories of held-out tasks occur in no other task.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

from examples.repositories.tasks import FOLDER, File, new_repository, new_task

_TRAIN, _HELDOUT = 24, 8
"""Repositories; each has up to `_TASKS` tasks."""
_TASKS = 10
_SEED = 11


def main() -> None:
    rng = random.Random(_SEED)
    shutil.rmtree(FOLDER, ignore_errors=True)
    for kind, count in (("train", _TRAIN), ("heldout", _HELDOUT)):
        lines = []
        for number in range(count):
            name, repository = f"{kind}-{number}", new_repository(rng)
            _write(FOLDER / name, repository)
            tasks = {task["prompt"]: task for task in _tasks(rng, repository)}
            lines += [
                json.dumps({"task_id": f"{name}-{at}", "repository": name, **task})
                for at, task in enumerate(tasks.values())
            ]
        out = Path(__file__).with_name(f"{kind}.jsonl")
        out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _tasks(rng: random.Random, repository: list[File]) -> list[dict[str, str]]:
    return [new_task(rng, repository) for _ in range(_TASKS)]


def _write(folder: Path, repository: list[File]) -> None:
    folder.mkdir(parents=True)
    for file in repository:
        (folder / f"{file.name}.py").write_text(file.text, encoding="utf-8")


if __name__ == "__main__":
    main()
