"""One run trains the planner and the coder of one agent on a real vLLM, and is killed once."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest

from proxy.run_files.files import read_jsonl
from proxy.store import open_store
from tests.pages import ROOT
from trainer.checkpoint import Checkpoints
from trainer.run.folder import RunFolder

pytestmark = [pytest.mark.engine, pytest.mark.long]

POLICIES = ("planner", "coder")
STEPS = 3
TOLERANCE = 1e-4
"""Of the mean |Δ log p| between trainer and engine; both compute in float32."""
FILES = ("agentic_trainer.yaml", "examples/quickstart/planner_coder.yaml")


async def start(folder: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        Path(sys.executable).with_name("agentic-train"),
        *(word for file in FILES for word in ("--config", file)),
        *(f"trainer.run_dir={folder}", f"trainer.steps={STEPS}", "trainer.save_every=1"),
        *("rollout.groups_per_step=4", "rollout.group_size=4", "eval.limit=4"),
        "logging.progress=plain",
        cwd=ROOT,
        env=os.environ,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )


async def test_run_trains_both_policies_and_continues_with_both_after_a_kill(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    first = await start(folder)
    assert first.stdout is not None
    async for line in first.stdout:
        if b"step 2" in line:
            break
    first.send_signal(signal.SIGKILL)
    await first.communicate()
    second = await start(folder)
    said, _ = await second.communicate()
    assert second.returncode == 0, said.decode()
    assert "continuing from" in said.decode()

    run = RunFolder(folder)
    steps = [line for line in read_jsonl(run.metrics) if "mismatch/logp_abs_mean" in line]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    for policy in POLICIES:
        for step in steps:
            assert step[f"policies/{policy}/mismatch/logp_abs_mean"] < TOLERANCE
            assert step[f"policies/{policy}/staleness/max"] == 0
            assert step[f"policies/{policy}/sync/probe_abs_mean"] < TOLERANCE
    saved = Checkpoints(run.checkpoints, keep_last=2).latest()
    assert saved is not None
    adapters = [
        (saved.path / "policies" / policy / "adapter/adapter_model.safetensors").read_bytes()
        for policy in POLICIES
    ]
    assert adapters[0] != adapters[1]
    await check_sessions(run)


async def check_sessions(run: RunFolder) -> None:
    """Each turn of a trial was sampled by the policy of the model name that the agent used."""
    store = await open_store(f"sqlite:///{run.sessions}")
    trials = [line["trial_id"] for line in read_jsonl(run.trials_log)]
    seen: Counter[str] = Counter()
    for trial in trials:
        log = (run.trials / trial / "agent.log").read_text()
        asked = [line.partition(" ")[0] for line in log.splitlines() if " {" in line]
        turns = await store.get_turns(trial)
        assert [turn.policy for turn in turns if turn.sampled] == asked
        seen.update(asked)
    await store.close()
    assert set(seen) == set(POLICIES)
