"""A relay worker with a real vLLM, started by the command that needs it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from agent_loop.producers.trial_list import read_lines
from proxy.store import open_store
from tests.trainer.test_eval_and_collect import agentic_train, write_config

pytestmark = pytest.mark.slow


async def test_trials_run_on_a_vllm_that_connects_to_their_proxy(
    tiny_model: Path, tmp_path: Path
) -> None:
    path, out = write_config(tmp_path, tiny_model, "http://unused"), tmp_path / "out"
    settings = yaml.safe_load(Path(path).read_text()) | {
        "engine": {"replicas": 0, "max_context_tokens": 512, "max_sequences": 4},
        "relay": {"workers": [{"command": [sys.executable, "-m", "trainer.cli", "relay-worker"]}]},
    }
    Path(path).write_text(yaml.safe_dump(settings))
    code, said = await agentic_train("eval", "--config", path, "--out", str(out))
    assert code == 0, said
    assert "relay: relay-0 is connected (1 of 1 workers)" in said
    trials = read_lines(out / "trials.jsonl")
    assert [line.turns for line in trials] == [1, 1]
    assert {line.status for line in trials} <= {"done", "truncated"}
    store = await open_store(f"sqlite:///{out / 'sessions.db'}")
    try:
        turns = await store.get_turns(trials[0].trial_id)
    finally:
        await store.close()
    assert turns[0].engine == "relay-0"
    assert len(turns[0].sampled_ids) > 0
