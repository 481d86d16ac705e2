"""A run of two agents on a real vLLM, which is resumed: the quickstart's function and program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from proxy.run_files.files import read_jsonl
from trainer.run.folder import RunFolder

pytestmark = [pytest.mark.engine, pytest.mark.long]

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples/quickstart"


def agentic_train(*arguments: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "trainer.cli", *arguments],
        check=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=900,
    )


def test_two_agents_train_one_policy_and_continue(tmp_path: Path) -> None:
    orders = (QUICKSTART / "train.jsonl").read_text().splitlines()
    (tmp_path / "shared.jsonl").write_text("\n".join(orders[:8]) + "\n")
    (tmp_path / "own.jsonl").write_text("\n".join(orders[8:16]) + "\n")
    program = {
        "command": {"argv": ["{python}", "{root}/examples/quickstart/agent.py"]},
        "verifier": {"argv": ["{python}", "{root}/examples/quickstart/verify.py"]},
        "data": {"train_files": [str(tmp_path / "own.jsonl")]},
    }
    function = {
        "python": {"target": f"{QUICKSTART}/agent.py:run"},
        "grader": {"target": f"{QUICKSTART}/verify.py:grade"},
    }
    settings = {
        "model": {"path": str(QUICKSTART / "model")},
        "agents": {"function": function, "program": program},
        "data": {
            "train_files": [str(tmp_path / "shared.jsonl")],
            "val_files": [str(QUICKSTART / "heldout.jsonl")],
        },
        "rollout": {"groups_per_step": 2, "group_size": 2, "concurrency": 2},
        "eval": {"before": False, "limit": 2},
        "trainer": {"run_dir": str(tmp_path / "run"), "steps": 1, "device": "cpu"},
        "logging": {"progress": "plain", "tensorboard": False},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    agentic_train("--config", str(tmp_path / "config.yaml"))
    agentic_train("resume", str(tmp_path / "run"), "trainer.steps=2")

    folder = RunFolder(tmp_path / "run")
    steps = list(read_jsonl(folder.metrics))
    trained = [line for line in steps if "agent/program/trials" in line]
    assert [line["step"] for line in trained] == [1, 2]
    for line in trained:
        assert line["agent/function/trials"] == line["agent/program/trials"] == 2
        assert line["agent/function/failed"] == line["agent/program/failed"] == 0
    trials = [line for line in read_jsonl(folder.trials_log) if line["kind"] == "train"]
    assert {(line["agent"], line["source"]) for line in trials} == {
        ("function", "shared"),
        ("program", "program/own"),
    }
    assert len({line["task_id"] for line in trials}) == 4  # two of each source, none twice
    evaluated = json.loads(folder.summary.read_text())["eval"]["after"]
    assert evaluated["per_agent"]["function"]["tasks"] == 2
