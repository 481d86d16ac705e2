"""verl's whole PPO trainer on `RemoteAgentLoop`, without a GPU; nothing of verl is scripted."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.verl.__main__ import metrics
from tests.needs import needs
from tests.pages import ROOT

pytestmark = [
    pytest.mark.long,
    needs(
        None
        if importlib.util.find_spec("verl")
        else "verl is not installed: python -m benchmarks.install reference"
    ),
]

STEPS = 3
TOLERANCE = 1e-4
"""Of a token's probability, recorded and computed by verl's trainer; both compute in float32. The
largest difference in a run of 24 steps was 7e-6; with weights that are one step old it was 0.2."""


def test_run_trains_on_the_recorded_tokens(tmp_path: Path) -> None:
    python_m = [sys.executable, "-m", "benchmarks.verl", "--out", str(tmp_path)]
    no_warmup = "actor_rollout_ref.actor.optim.lr_warmup_steps=0"
    subprocess.run(
        [*python_m, "--steps", str(STEPS), "--held-out", "4", no_warmup], cwd=ROOT, check=True
    )

    before, *steps = metrics(tmp_path / "metrics.jsonl")
    assert "val-core/quickstart/reward/mean@1" in before
    assert "val-core/quickstart/reward/mean@1" in steps[-1]
    assert [step["training/global_step"] for step in steps] == list(range(1, STEPS + 1))
    assert any(step["actor/grad_norm"] > 0 for step in steps[:-1])
    for step in steps:
        assert 0 < step["critic/score/mean"] < 1
        assert step["training/rollout_probs_diff_max"] < TOLERANCE
        assert step["training/off_policy/trajectory_staleness/max"] == 0
