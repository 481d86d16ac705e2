"""`agentic-train` on its own Ray cluster: two real vLLMs and two ranks of the trainer.

It takes three minutes of processor time. After each update every engine scores a
probe, and the run fails if an engine disagrees with the trainer (`engine.verify`). A run that
succeeds has therefore had exact weights everywhere, also in the vLLM that replaced the killed one.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from proxy.run_files.files import read_jsonl
from tests.e2e.test_train_process import (
    TRIALS_PER_STEP,
    configure,
    servers,
    summary,
    train,
    trials,
)
from tests.needs import skip_or_fail
from tests.processes import assert_all_end, command_line, descendants
from trainer.run.folder import RunFolder

try:
    import ray  # noqa: F401
except ImportError:
    skip_or_fail("ray is not installed: pip install 'agentic-rl[ray]'", at_import=True)

pytestmark = pytest.mark.long

STEPS = 2
ON_RAY = ("cluster.backend=ray", "trainer.ranks=2", f"trainer.steps={STEPS}")


def test_run_that_loses_a_vllm_actor_ends_with_equal_weights_everywhere(
    tiny_model: Path, tmp_path: Path
) -> None:
    engine = {"replicas": 2, "max_context_tokens": 512, "max_sequences": 4}
    config = configure(tmp_path, tiny_model, engine)
    with train(tmp_path, "--config", str(config), *ON_RAY) as run:
        assert run.word()[0] == "answered"
        watched = run.watch()
        assert len(servers(run)) == 2
        actor, *_ = actors(run.process.pid, "EngineActor")
        os.kill(actor, signal.SIGKILL)
        assert run.wait() == 0, run.said
        assert_all_end(watched)
    assert run.said.count("warning: engine-") == 1
    assert summary(tmp_path)["status"] == "done"
    lines = list(read_jsonl(RunFolder(tmp_path / "run").metrics))
    assert [line["step"] for line in lines] == [1, 2]
    assert len(trials(tmp_path)) == STEPS * TRIALS_PER_STEP


def actors(pid: int, kind: str) -> list[int]:
    return [each for each in descendants(pid) if command_line(each).startswith(f"ray::{kind}")]
