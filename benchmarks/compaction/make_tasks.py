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
    vaults: dict[tuple[str, ...], dict[str, Any]] = {}
    while len(vaults) < _TRAIN + _HELD_OUT:
        vault = new_vault(rng)
        vaults[tuple(vault["words"])] = vault
    different = list(vaults.values())
    _write("train", different[:_TRAIN])
    _write("eval", different[_TRAIN:])


def _write(name: str, vaults: list[dict[str, Any]]) -> None:
    lines = [json.dumps({"task_id": f"{name}-{i}", **vault}) for i, vault in enumerate(vaults)]
    Path(__file__).with_name(f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
