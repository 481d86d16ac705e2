"""How much of this project a command loads before it begins."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.cli import main

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, sys
import {module}
print(json.dumps(sorted(sys.modules)))
"""
OURS = ("proxy", "agent_loop", "trainer", "harbor_sdk")


def loaded(module: str) -> list[str]:
    """The names of the modules that an import of `module` loads."""
    program = PROGRAM.format(module=module)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def ours(module: str) -> list[str]:
    return [name for name in loaded(module) if name.partition(".")[0] in OURS]


def test_start_loads_at_most_200_of_our_modules_and_no_extra() -> None:
    found = ours("trainer.start")
    assert len(found) <= 200, found
    assert [name for name in found if ".extras." in name] == []
    training = {"trainer.fit", "trainer.learning.learner", "trainer.cluster.services"}
    assert training.isdisjoint(found), "what only a run that trains needs is loaded by its main"


def test_relay_worker_loads_no_renderer() -> None:
    """Its engine gets ids. It starts in 1.1 s of processor time, with renderers in 2.8 s."""
    assert "renderers" not in loaded("proxy.extras.relay.worker_process")


def test_check_of_a_proven_model_loads_no_code_of_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take longer than the rest of the command. The first check, here, proves the model
    and loads it all."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(ROOT)
    heavy = ("torch._dynamo", "torch.distributed.tensor", "transformers.modeling_utils", "sympy")
    command = ["--config", "agentic_trainer.yaml", "--check"]
    assert main(command) in (0, None)
    assert list(tmp_path.glob("agentic-rl/architectures/*"))
    assert set(heavy) <= set(sys.modules)
    program = f"""
import sys
from trainer.cli import main
assert main({command!r}) in (0, None)
print("loaded:", [name for name in {heavy!r} if name in sys.modules])
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert said.returncode == 0, said
    assert said.stdout.splitlines()[-1] == "loaded: []"
