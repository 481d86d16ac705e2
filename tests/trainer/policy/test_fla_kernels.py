"""fla's own kernels, which compute Gated DeltaNet on GPUs, run by Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.needs import needs

ROOT = Path(__file__).parents[3]
FLA = ROOT / ".cache/fla"
pytestmark = [
    pytest.mark.long,
    needs(None if (FLA / ".ready").exists() else "run python -m benchmarks.install fla"),
]


def test_fla_on_a_tree_is_the_trainers_rule_and_needs_the_expected_memory() -> None:
    """Outputs and gradients of a tree whose states are forked twice, and the planned memory."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(FLA)}
    program = [sys.executable, "-m", "tests.trainer.policy.fla_interpreted"]
    run = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout)
    assert max(found["tree"].values()) < 5e-6, found["tree"]
    memory = found["memory"]
    # The kernel also keeps betas twice, in one memory, and the bounds of the runs.
    assert 0.95 < memory["kept"] / memory["kept, expected"] < 1.05
    assert 0.95 < memory["backward"] / memory["backward, expected"] < 1.05
