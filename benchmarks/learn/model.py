"""The model of the simulated users' agent: the starter model with this benchmark's expert."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MODEL = Path(".cache/learn/model")
RECIPE = (
    *("--expert", "benchmarks.learn.expert:transcript", "--transcripts", "3000", "--epochs", "4"),
    *("--lengths", "mixed", "--max-loss", "0.2"),
)


def make_model() -> None:
    """Makes the model, in about five minutes, if it is not there."""
    command = [sys.executable, "-m", "examples.starter_model", *RECIPE, "--out", str(MODEL)]
    MODEL.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(command, check=True)
