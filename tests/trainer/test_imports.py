"""How much of this project a command loads before it begins."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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
