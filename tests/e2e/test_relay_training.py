"""`agentic-train` whose only engine is behind the relay: the worker pulls each version of the
weights, and every trained token was sampled with a published one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from proxy.run_files.files import read_jsonl
from proxy.store import open_store
from proxy.store.protocol import SessionFilter
from proxy.weights.publication import MANIFEST, decode_manifest
from tests.trainer.test_eval_and_collect import agentic_train, write_config
from trainer.run.folder import RunFolder

pytestmark = pytest.mark.slow

STEPS = 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_two_steps_with_an_engine_that_pulls_its_weights(
    tiny_model: Path, tmp_path: Path, dtype: str
) -> None:
    path = Path(write_config(tmp_path, tiny_model, "http://unused"))
    with (tmp_path / "agent.py").open("a") as agent:
        agent.write("open('answer', 'w').write(answer)\n")
    published = tmp_path / "published"
    remote_agent = yaml.safe_load(path.read_text())["remote_agent"]
    reward = 'tr -dc a-z < answer | wc -c > "$REWARD_DIR/reward.txt"'
    settings = yaml.safe_load(path.read_text()) | {
        "engine": {
            "replicas": 0,
            "max_context_tokens": 512,
            "max_sequences": 4,
            "publish": f"file://{published}",
            "publish_full_every": 2,
        },
        "relay": {"workers": [{"command": [sys.executable, "-m", "trainer.cli", "relay-worker"]}]},
        "model": {"path": str(tiny_model), "compute_dtype": dtype},
        "rollout": {"group_size": 2, "groups_per_step": 2, "max_tokens": 24},
        "remote_agent": remote_agent | {"verifier": {"argv": ["sh", "-c", reward]}},
        "optimizer": {"lr": 1e-3, "schedule": "constant"},
        "trainer": {"steps": STEPS, "device": "cpu", "run_dir": str(tmp_path / "runs")},
        "eval": {"before": False, "after": False},
    }
    path.write_text(yaml.safe_dump(settings))
    code, said = await agentic_train("--config", str(path))
    assert code == 0, said
    run = RunFolder.latest(tmp_path / "runs")
    assert run is not None
    steps = list(read_jsonl(run.metrics))
    assert [line["step"] for line in steps if "sync/delta_bytes" in line] == [1, 2]
    tolerance = 1e-3 if dtype == "float32" else 2e-2
    for line in steps:
        assert line["mismatch/logp_abs_mean"] < tolerance
        assert line["sync/probe_abs_mean"] < tolerance
        assert line["sync/pull_s"] > 0
    versions = sorted(each.name[:7] for each in (published / run.run_id).iterdir())
    assert versions == ["v000000", "v000001", "v000002"]
    # The engine's types are known from the first version on.
    (first,) = (published / run.run_id).glob("v000001-*")
    manifest = decode_manifest((first / MANIFEST).read_bytes(), f"{run.run_id}/{first.name}")
    assert {each.dtype for each in manifest.tensors} == {dtype}
    assert {each.trained for each in manifest.tensors} == {"float32"}
    assert (manifest.delta is not None) == (dtype == "float32")
    assert steps[1]["sync/delta_bytes"] > 0
    store = await open_store(f"sqlite:///{run.sessions}")
    try:
        sampled = set()
        for session in await store.list_sessions(SessionFilter()):
            for turn in await store.get_turns(session.session_id):
                assert turn.engine == "relay-0"
                sampled |= {span.version for span in turn.versions}
    finally:
        await store.close()
    assert sampled == {0, 1}
