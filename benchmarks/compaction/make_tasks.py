"""Writes train.jsonl and eval.jsonl: `python -m benchmarks.compaction.make_tasks`."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from benchmarks.compaction.vault import new_vault

_TRAIN, _HELD_OUT = 64, 32
_SEED = 5


def main() -> None:
    rng = random.Random(_SEED)
    _write("train", [new_vault(rng) for _ in range(_TRAIN)])
    _write("eval", [new_vault(rng) for _ in range(_HELD_OUT)])


def _write(name: str, vaults: list[dict[str, Any]]) -> None:
    lines = [json.dumps({"task_id": f"{name}-{i}", **vault}) for i, vault in enumerate(vaults)]
    Path(__file__).with_name(f"{name}.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
