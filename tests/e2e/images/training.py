"""`agentic-train` on a tiny model that reads images, and what transformers makes of its records.

PYTHONPATH=.cache/torchvision:. python -m tests.e2e.images.training gemma3 trained 2

The arguments are the kind of model, `model.vision` and the number of ranks. The agent is that of
examples/images; its rewards have nothing to do with the task, so that rewards differ. Prints JSON:
the metrics of the steps; how far the tower moved; and of the answers of the last step the mean
|Δ log p| between the record and the weights before that step (`differences`), and between the
record and the same weights with the tower of the beginning (`first_tower`).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from examples.images.screens import screens
from proxy.records import Turn, TurnStatus
from proxy.records.images import engine_ids
from proxy.run_files.files import read_jsonl
from proxy.store import open_store
from proxy.store.protocol import SessionFilter
from proxy.token_tree.paths import path, prefix_images
from tests.e2e.images.checkpoints import MODELS
from tests.e2e.images.compare import Own
from tests.e2e.test_images import TOWERS

STEPS = 3


def found(kind: str, vision: str, ranks: int, folder: Path) -> dict[str, Any]:
    model, run = folder / "model", folder / "run"
    MODELS[kind](model)
    dtype = "bfloat16" if kind == "qwen3_5" else "float32"
    words = [
        *("--config", "examples/images/agentic_trainer.yaml", "data.val_files=[]"),
        *(f"model.path={model}", f"model.vision={vision}", f"model.compute_dtype={dtype}"),
        *(f"trainer.run_dir={run}", f"trainer.steps={STEPS}", "trainer.save_every=1"),
        *(f"trainer.ranks={ranks}", "rollout.groups_per_step=2", "rollout.group_size=4"),
        *("algorithm.mini_batches=2", "optimizer.lr=1e-2", "optimizer.warmup_steps=0"),
        "remote_agent.grader.target=examples/recipes/any_number.py:grade",
    ]
    command = [sys.executable, "-m", "trainer.cli", *words]
    subprocess.run(command, check=True, stdout=sys.stderr)
    before, last = (run / f"checkpoints/step-{step:06}/model" for step in (STEPS - 1, STEPS))
    old, new, moved = (load_file(f / "model.safetensors") for f in (model, before, last))
    tower = [name for name in old if name.startswith(TOWERS)]
    with_old = folder / "with the first tower"
    shutil.copytree(before, with_old)
    save_file(
        new | {name: old[name] for name in tower},
        with_old / "model.safetensors",
        metadata={"format": "pt"},
    )
    turns = asyncio.run(recorded(run / "sessions.db"))
    return {
        "steps": [each for each in read_jsonl(run / "metrics.jsonl") if each["step"] > 0],
        "moved": max(float((moved[name] - old[name]).abs().max()) for name in tower),
        "same names": moved.keys() == old.keys(),
        "differences": differences(Own(kind, before, getattr(torch, dtype)), turns),
        "first_tower": differences(Own(kind, with_old, getattr(torch, dtype)), turns),
    }


async def recorded(store: Path) -> list[list[Turn]]:
    """The turns of each session of the last step."""
    opened = await open_store(f"sqlite:///{store}")
    try:
        names = [each.session_id for each in await opened.list_sessions(SessionFilter())]
        found = [await opened.get_turns(each) for each in names]
    finally:
        await opened.close()
    versions = [{span.version for turn in turns for span in turn.versions} for turns in found]
    return [turns for turns, own in zip(found, versions, strict=True) if own == {STEPS - 1}]


def differences(own: Own, sessions: list[list[Turn]]) -> list[float]:
    images = pictures()
    out = []
    for turns in sessions:
        for turn in turns:
            assert turn.status is TurnStatus.DONE
            spans = prefix_images(turns, turn.index, turn.path_tokens)
            ids = engine_ids(path(turns, turn.index), spans)
            if (ids == own.image_token).sum() != sum(span.tokens for span in spans):
                continue  # it was sampled, as a text that transformers does not compute
            shown = [images[span.sha256] for span in spans]
            logprobs = own.logprobs(ids.tolist(), shown)[turn.prompt_tokens - 1 :]
            out.append(float(np.abs(logprobs - turn.logprobs).mean()))
    return out


def pictures() -> dict[str, Any]:
    """The screens of the tasks, by the digests of their bytes."""
    tasks = Path("examples/images/train.jsonl").read_text(encoding="utf-8").splitlines()
    shown = (screen for line in tasks[:100] for screen in screens(json.loads(line)["seed"]))
    return {hashlib.sha256(each.png()).hexdigest(): each.image() for each in shown}


def main() -> None:
    kind, vision, ranks = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        sys.stdout.write(json.dumps(found(kind, vision, int(ranks), Path(folder))))


if __name__ == "__main__":
    main()
