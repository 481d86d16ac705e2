"""Runs a program of this folder in an environment in which a vLLM on a CPU prepares images."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.needs import needs

ROOT = Path(__file__).parents[3]
TORCHVISION = ROOT / ".cache/torchvision"
TIMEOUT_S = 600
_TRL = "TRL's chat templates are missing: run python -m benchmarks.install reference"
_NO_TORCHVISION = "torchvision is missing: run python -m benchmarks.install torchvision"
MARKS = [
    pytest.mark.engine,
    pytest.mark.long,
    needs(None if find_spec("trl") else _TRL),
    needs(None if (TORCHVISION / ".ready").exists() else _NO_TORCHVISION),
]


@cache
def printed(program: str, *words: str) -> dict[str, Any]:
    """The JSON that the program prints for a kind of model, the first of the words."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.e2e.images.{program}", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (TORCHVISION, ROOT)))},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
