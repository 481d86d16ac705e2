"""The recipes on tiny models: the real agents in real Harbor trials, vLLM on a CPU, one update."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from proxy.run_files.files import read_jsonl
from tests.e2e.harbor_server import needs_harbor
from tests.needs import needs
from tests.pages import ROOT

MADE = ROOT / ".cache/recipes/.ready"
AGENTS = ROOT / ".agents/.ready"
pytestmark = [
    *needs_harbor,
    needs(None if AGENTS.exists() else "no .agents: make agents"),
    needs(None if MADE.exists() else "no tiny models: python -m benchmarks.install recipes"),
    pytest.mark.long,
    pytest.mark.engine,
    pytest.mark.agents,
]


@pytest.mark.parametrize(
    ("model", "agent", "calls", "paths", "images"),
    [
        ("qwen3-8b", "claude-code", 4, 1, False),  # continues what the length limit cut
        ("qwen3.5-4b", "codex", 1, 1, False),
        ("qwen3.5-4b", "mini-swe-agent", 3, 3, False),  # drops answers without a call
        ("qwen3-vl-4b", "claude-code", 4, 1, True),
        ("qwen3.5-4b", "claude-code", 4, 4, True),  # cut while it reasons
    ],
)
def test_every_step_of_a_recipe_runs_on_a_tiny_model(
    model: str, agent: str, calls: int, paths: int, images: bool, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    done = subprocess.run(
        [
            *("examples/recipes/train.sh", model, agent, *(["--images"] if images else [])),
            "--tiny",
            *(f"trainer.run_dir={run}", "trainer.steps=1"),
        ],
        cwd=ROOT,
        env={
            **{name: value for name, value in os.environ.items() if name != "HARBOR_SERVER_TOKEN"},
            "HARBOR_SERVER_PORT": "0",
            "HARBOR_STATE_DIR": str(tmp_path / "server"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (step,) = (each for each in read_jsonl(run / "metrics.jsonl") if each["step"] == 1)
    assert (step["rollout/trials"], step["rollout/failed"]) == (4, 0)
    assert (step["rollout/turns"], step["rollout/branches"]) == (calls, paths)
    assert step["actor/trained_tokens"] == step["rollout/sampled_tokens"] > 0
    assert step["actor/grad_norm"] > 0
    assert step["mismatch/logp_abs_mean"] < 0.04
    assert step["sync/probe_abs_mean"] < 0.1
    trials = list(run.glob("trials/*/harbor_run.json"))
    rewards = [json.loads(file.read_text())["rewards"] for file in trials]
    assert rewards == [{"reward": 0.0, "fixed": 0.0, "kept": 1.0}] * 4
    tasks = {file.parent.name.rpartition("-")[0] for file in trials}
    assert shown(run) == ({task: drawn(task) for task in tasks} if images else {})


def shown(run: Path) -> dict[str, str]:
    """Task → SHA-256 of the picture that its trials sent."""
    with closing(sqlite3.connect(run / "sessions.db")) as records:
        rows = records.execute("SELECT session_id, sha256 FROM session_images").fetchall()
    return {trial.rpartition("-")[0]: sha256 for trial, sha256 in rows}


def drawn(task: str) -> str:
    file = ROOT / ".cache/recipes/pictures/train" / task / "environment/repository/report.png"
    return hashlib.sha256(file.read_bytes()).hexdigest()
