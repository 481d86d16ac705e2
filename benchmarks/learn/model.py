"""The models of the simulated users' agents: the starter model with this benchmark's experts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MODEL = Path(".cache/learn/model")
CLAUDE_MODEL = Path(".cache/learn/claude-code")
EXPERTS = {MODEL: "transcript", CLAUDE_MODEL: "claude_transcript"}
RECIPE = (
    *("--transcripts", "3000", "--epochs", "4", "--lengths", "mixed"),
    *("--max-loss", "0.2"),
)


def make_model(path: Path) -> None:
    """Makes the model, in about five minutes, if it is not there."""
    expert = ("--expert", f"benchmarks.learn.expert:{EXPERTS[path]}")
    command = [sys.executable, "-m", "examples.starter_model", *expert, *RECIPE, "--out", str(path)]
    path.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(command, check=True)
