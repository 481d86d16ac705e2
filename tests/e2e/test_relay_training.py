"""`agentic-train` whose only engine is behind the relay: the worker pulls each version of the
weights, or of an adapter, and every trained token was sampled with a published one.

CI has its parts: a vLLM that connects to the proxy of its trials (`test_relay_workers.py`), and the
weights that workers pull (`tests/proxy/extras/relay`).
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from proxy.extras.relay.weights.publication import MANIFEST, decode_manifest
from proxy.run_files.files import read_jsonl
from proxy.store import open_store
from proxy.store.protocol import SessionFilter
from tests.trainer.test_eval_and_collect import agentic_train, write_config
from trainer.run.folder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.long]

STEPS = 2


def configured(
    model: Path, tmp_path: Path, dtype: str, steps: int, lora: dict[str, Any] | None = None
) -> tuple[Path, Path]:
    """The configuration's file, and the folder in which the weights are published."""
    path = Path(write_config(tmp_path, model, "http://unused"))
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
        "model": {"path": str(model), "compute_dtype": dtype, "lora": lora},
        "rollout": {"group_size": 2, "groups_per_step": 2, "max_tokens": 24},
        "remote_agent": remote_agent | {"verifier": {"argv": ["sh", "-c", reward]}},
        "optimizer": {"lr": 1e-3, "schedule": "constant"},
        "trainer": {"steps": steps, "device": "cpu", "run_dir": str(tmp_path / "runs")},
        "eval": {"before": False, "after": False},
    }
    path.write_text(yaml.safe_dump(settings))
    return path, published


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_two_steps_with_an_engine_that_pulls_its_weights(
    tiny_model: Path, tmp_path: Path, dtype: str
) -> None:
    path, published = configured(tiny_model, tmp_path, dtype, STEPS)
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
    # The engine is asked for its types before anything is published.
    (first,) = (published / run.run_id).glob("v000000-*")
    manifest = decode_manifest((first / MANIFEST).read_bytes(), f"{run.run_id}/{first.name}")
    assert {each.dtype for each in manifest.tensors} == {dtype}
    assert {each.trained for each in manifest.tensors} == {"float32"}
    assert [line["sync/delta_bytes"] > 0 for line in steps[:2]] == [True, True]
    assert await sampled_by(run, "") == {0, 1}


async def sampled_by(run: RunFolder, policy: str) -> set[int]:
    """The versions of all tokens, which the relay's only engine has sampled for the policy."""
    store = await open_store(f"sqlite:///{run.sessions}")
    try:
        sampled = set()
        for session in await store.list_sessions(SessionFilter()):
            for turn in await store.get_turns(session.session_id):
                assert turn.engine == "relay-0"
                assert turn.sampling.get("policy", "") == policy
                sampled |= {span.version for span in turn.versions}
    finally:
        await store.close()
    return sampled


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_run_that_is_continued_with_an_engine_that_pulls_its_adapters(
    tiny_model: Path, tmp_path: Path, dtype: str
) -> None:
    lora = {"rank": 4, "alpha": 8, "update": "adapter", "policy": "shop"}
    path, published = configured(tiny_model, tmp_path, dtype, 1, lora=lora)
    settings = yaml.safe_load(path.read_text())
    for steps in (1, 3):
        settings["trainer"]["steps"] = steps
        path.write_text(yaml.safe_dump(settings))
        code, said = await agentic_train("--config", str(path))
        assert code == 0, said
    run = RunFolder.latest(tmp_path / "runs")
    assert run is not None
    lines = [line for line in read_jsonl(run.metrics) if "sync/pull_s" in line]
    assert [line["step"] for line in lines] == [1, 2, 3]
    tolerance = 1e-3 if dtype == "float32" else 2e-2
    for line in lines:
        assert line["mismatch/logp_abs_mean"] < tolerance
        assert line["sync/probe_abs_mean"] < tolerance
        assert line["sync/paused_s"] == 0
        print({name: value for name, value in line.items() if name.startswith("sync/")})
    names = sorted(each.name.partition("-")[0] for each in (published / run.run_id).iterdir())
    assert names == ["v000000", "v000002", "v000003"]  # the first is the random adapter
    assert await sampled_by(run, "shop") == {0, 1, 2}


async def test_worker_that_is_killed_in_training_is_replaced_and_serves_the_current_weights(
    tiny_model: Path, tmp_path: Path
) -> None:
    path, _ = configured(tiny_model, tmp_path, "float32", 3)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "trainer.cli", "--config", str(path)),
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout is not None
    said = ""
    while "step 1/3" not in said:
        line = (await process.stdout.readline()).decode()
        assert line, said
        said += line
    for child in psutil.Process(process.pid).children(recursive=True):
        if child.cmdline()[1:] == ["-m", "trainer.cli", "relay-worker"]:
            child.kill()
    said += (await process.stdout.read()).decode()
    assert await process.wait() == 0, said
    assert "warning: relay-0 ended with exit code 137" in said
    assert "relay: relay-0.2 is connected" in said
    steps = list(read_jsonl(tmp_path / "runs" / "metrics.jsonl"))
    assert [line["mismatch/logp_abs_mean"] < 1e-3 for line in steps] == [True] * 3
