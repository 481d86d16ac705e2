"""How much of this project a command loads before it begins."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, sys
import {module}
print(json.dumps(sorted(sys.modules)))
"""
OURS = ("proxy", "agent_loop", "trainer", "harbor_sdk")


def loaded(module: str) -> list[str]:
    """The names of our modules that an import of `module` loads."""
    program = PROGRAM.format(module=module)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return [name for name in json.loads(done.stdout) if name.partition(".")[0] in OURS]


def test_start_loads_at_most_200_of_our_modules_and_no_extra() -> None:
    ours = loaded("trainer.start")
    assert len(ours) <= 200, ours
    assert [name for name in ours if ".extras." in name] == []
    training = {"trainer.fit", "trainer.learning.learner", "trainer.cluster.services"}
    assert training.isdisjoint(ours), "what only a run that trains needs is loaded by its main"


def test_check_of_a_proven_model_loads_no_code_of_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take longer than the rest of the command. The first check proves the model."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    program = """
import sys
from trainer.cli import main
assert main(["--config", "agentic_trainer.yaml", "--check"]) in (0, None)
heavy = ("torch._dynamo", "torch.distributed.tensor", "transformers.modeling_utils", "sympy")
print("loaded:", [name for name in heavy if name in sys.modules])
"""
    said = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
        for _ in range(2)
    ]
    assert [done.returncode for done in said] == [0, 0], said
    first, again = (done.stdout.splitlines()[-1] for done in said)
    assert "transformers.modeling_utils" in first
    assert again == "loaded: []"
