"""Two runs at the same time on one proxy and one real vLLM, each with an adapter of its own."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from proxy.client import ProxyClient
from proxy.engines.vllm_server import VllmConfig, VllmServer
from proxy.run_files.files import read_jsonl
from tests.e2e.test_proxy_killed import ADMIN_KEY, Proxy
from tests.pages import ROOT
from trainer.checkpoint import Checkpoints
from trainer.policy.adapter import adapter_arguments
from trainer.run.folder import RunFolder

pytestmark = [pytest.mark.engine, pytest.mark.long]

MODEL = ROOT / "examples/quickstart/model"
POLICIES = ("planner", "coder")
STEPS = 3
TRIALS = 16
TOLERANCE = 1e-4
"""Of the mean |Δ log p| between trainer and engine; both compute in float32."""


async def train(policy: str, folder: Path, proxy_url: str, engine_url: str) -> RunFolder:
    config = folder / f"{policy}.yaml"
    sections = {
        "model": {"lora": {"policy": policy}},
        "proxy_server": {"url": proxy_url},
        "engine": {"urls": [engine_url]},
        "rollout": {"groups_per_step": TRIALS // 4, "group_size": 4},
        "eval": {"limit": 4},
        "trainer": {
            "run_dir": str(folder / policy),
            "steps": STEPS,
            "seed": POLICIES.index(policy),
        },
    }
    config.write_text(yaml.safe_dump(sections))
    files = ("agentic_trainer.yaml", "examples/quickstart/adapter.yaml", str(config))
    process = await asyncio.create_subprocess_exec(
        Path(sys.executable).with_name("agentic-train"),
        *(word for file in files for word in ("--config", file)),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=os.environ | {"AGENTIC_PROXY_ADMIN_KEY": ADMIN_KEY},
    )
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()
    found = RunFolder.latest(folder / policy)
    assert found is not None
    return found


async def test_two_runs_on_one_engine_train_what_was_sampled_from_their_own_adapters(
    tmp_path: Path, unused_tcp_port: int
) -> None:
    """Each token's recorded log-probability is the one that the run's trainer computes, in every
    step, and each update is compared on the probe."""
    layers = tuple(adapter_arguments(MODEL))
    settings = VllmConfig(max_context_tokens=2048, lora_rank=8, lora_slots=4, args=layers)
    server = VllmServer(settings, MODEL, log=tmp_path / "vllm.log", dtype="float32")
    await server.start()
    proxy = Proxy(tmp_path, MODEL, server.url, unused_tcp_port)
    try:
        await proxy.start()
        async with asyncio.TaskGroup() as running:
            tasks = [
                running.create_task(train(policy, tmp_path, proxy.url, server.url))
                for policy in POLICIES
            ]
        async with ProxyClient(proxy.url, ADMIN_KEY) as control:
            sessions = await control.list_sessions(kind="train", limit=1000)
            turns = [(await control.get_turns(s["trial_id"]))[1] for s in sessions]
    finally:
        await proxy.stop()
        await server.stop()
    sampled = Counter(turn.policy for session in turns for turn in session)
    assert set(sampled) == set(POLICIES)
    assert all(len({turn.policy for turn in session}) <= 1 for session in turns)
    versions = {
        policy: {
            span.version
            for session in turns
            for turn in session
            if turn.policy == policy
            for span in turn.versions
        }
        for policy in POLICIES
    }
    assert versions == {policy: set(range(STEPS)) for policy in POLICIES}
    adapters = set()
    for run in [task.result() for task in tasks]:
        steps = [line for line in read_jsonl(run.metrics) if "mismatch/logp_abs_mean" in line]
        assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
        assert max(line["mismatch/logp_abs_mean"] for line in steps) < TOLERANCE
        assert max(line["staleness/max"] for line in steps) == 0
        assert max(line["sync/probe_abs_mean"] for line in steps) < TOLERANCE
        saved = Checkpoints(run.checkpoints, keep_last=2).latest()
        assert saved is not None
        adapters.add((saved.path / "adapter" / "adapter_model.safetensors").read_bytes())
    assert len(adapters) == len(POLICIES)
