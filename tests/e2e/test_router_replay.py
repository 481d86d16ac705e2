"""The routing of a real vLLM, recorded by the proxy, against that of the trainer.

On a CPU, vLLM returns its routing through our plug-in.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from agent_loop.records import Group, Rollout, RolloutStatus, Task
from agent_loop.trajectory import build_segments
from proxy.engines.vllm_server import VllmConfig, VllmServer
from proxy.records import Ids
from proxy.run_files.files import read_jsonl
from tests.e2e.mixtures import random_mixture, upcycled_starter
from tests.e2e.running_proxy import Running, running_proxy
from tests.e2e.test_weight_sync import disturb
from tests.pages import ROOT
from trainer.batch import Batch, build_batch
from trainer.optimizer_config import OptimizerConfig
from trainer.policy.model_config import ModelConfig
from trainer.policy.policy import Policy
from trainer.rows.packing import Layout
from trainer.run.folder import RunFolder
from trainer.weight_sync.control import EngineControl
from trainer.weight_sync.sync import WeightSync

pytestmark = [pytest.mark.engine, pytest.mark.long]

NOISE_NATS = 1e-4
"""Of the mean |Δ log p| between trainer and engine, if both compute in float32."""
ROUNDING_NATS = 5e-3
"""The same in bfloat16, for a model whose experts are nearly equal."""
SESSIONS = 8
TURNS = 3


def policy_of(model: Path, dtype: Literal["float32", "bfloat16"]) -> Policy:
    config = ModelConfig(path=model, compute_dtype=dtype, router_replay="replay")
    return Policy(config, OptimizerConfig())


async def push(policy: Policy, sync: WeightSync, version: int) -> None:
    weights = list(policy.named_hf_parameters())
    await asyncio.to_thread(sync.push, weights, version)


async def sampled(running: Running) -> Batch:
    """Conversations that were sampled at the same time, as a batch."""
    talks = (running.talk({"routed_experts": 1}, turns=TURNS) for _ in range(SESSIONS))
    task = Task("talk", {})
    rollouts = [
        Rollout(f"t-{n}", task, RolloutStatus.DONE, 1.0, segments=build_segments(turns))
        for n, turns in enumerate(await asyncio.gather(*talks))
    ]
    return build_batch([Group("g", task, rollouts)])


def mismatches(policy: Policy, batch: Batch) -> tuple[float, float]:
    """Mean |Δ log p| to the engine, with its routing and without."""
    found = policy.compare_routing(batch, temperature=1.0)
    return found["mismatch/with_replay_abs_mean"], found["mismatch/without_replay_abs_mean"]


@torch.no_grad()
def experts_of(policy: Policy, ids: Ids) -> Tensor:
    """`[T, L, K]`, the experts that the trainer's model chooses, the best first."""
    chosen: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
        chosen.append(output[2])

    gates = [layer.mlp.gate for layer in policy.model.get_decoder().layers]
    hooks = [gate.register_forward_hook(keep) for gate in gates]
    count = len(ids)
    layout = Layout(torch.full((count,), count), count)
    path = torch.tensor(ids.tolist())[None]
    policy.model.get_decoder()(input_ids=path, layout=layout, use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, 1)


def server_on(model: Path, folder: Path, dtype: str) -> VllmServer:
    config = VllmConfig(max_sequences=SESSIONS, routed_experts=True, weight_transfer="shm")
    return VllmServer(config, model, log=folder / "vllm.log", dtype=dtype)


async def test_recorded_experts_are_those_that_the_trainer_computes(tmp_path: Path) -> None:
    """In float32, before and after an update of the weights."""
    model = random_mixture(tmp_path / "model")
    policy = policy_of(model, "float32")
    async with (
        server_on(model, tmp_path, "float32") as server,
        running_proxy(model, server.url, tmp_path) as running,
    ):
        sync = WeightSync(EngineControl([server.url]))
        for version in (0, 1):
            if version:
                disturb(policy, version)
                await push(policy, sync, version)
            batch = await sampled(running)
            assert set(batch.versions.tolist()) == {version}
            for ids, routing in zip(batch.sequences, batch.routing, strict=True):
                assert routing is not None
                assert routing.known[:-1].all()
                own = experts_of(policy, ids)[:-1].sort(-1).values
                recorded = torch.as_tensor(routing.experts[:-1].astype("int64")).sort(-1).values
                assert torch.equal(own, recorded)
            assert max(mismatches(policy, batch)) < NOISE_NATS
        sync.close()


async def test_replay_leaves_only_rounding_of_the_mismatch_in_bfloat16(tmp_path: Path) -> None:
    """What remains with replay is what remains if all experts are equal, so that the router's
    choice has no effect."""
    model = random_mixture(tmp_path / "model")
    policy = policy_of(model, "bfloat16")
    async with (
        server_on(model, tmp_path, "bfloat16") as server,
        running_proxy(model, server.url, tmp_path) as running,
    ):
        sync = WeightSync(EngineControl([server.url]))
        replayed, routed = mismatches(policy, await sampled(running))
        print(f"with replay {replayed:.4f}, without {routed:.4f}")
        with torch.no_grad():
            for name, weight in policy.model.named_parameters():
                if ".experts." in name:
                    weight.copy_(weight[:1].expand_as(weight))
        await push(policy, sync, 1)
        floors = mismatches(policy, await sampled(running))
        print(f"equal experts: with replay {floors[0]:.4f}, without {floors[1]:.4f}")
        sync.close()
    assert 10 * replayed <= routed
    assert replayed <= 1.5 * floors[0]
    assert floors[0] == pytest.approx(floors[1], rel=0.1)


async def test_run_replays_the_routing_of_its_engine(tmp_path: Path) -> None:
    """With the auxiliary loss, too. The experts are nearly equal, so that replay changes little."""
    model, folder = upcycled_starter(tmp_path / "model"), tmp_path / "run"
    process = await asyncio.create_subprocess_exec(
        Path(sys.executable).with_name("agentic-train"),
        *("--config", "agentic_trainer.yaml"),
        *(f"model.path={model}", "model.compute_dtype=bfloat16", "model.router_replay=replay"),
        *("model.router_aux_loss=0.001", "algorithm.mini_batches=1"),
        *(f"trainer.run_dir={folder}", "trainer.steps=3", "eval.limit=4"),
        "logging.progress=plain",
        cwd=ROOT,
        env=os.environ,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    print(said.decode())
    assert process.returncode == 0, said.decode()
    steps = [
        line for line in read_jsonl(RunFolder(folder).metrics) if "mismatch/replayed_tokens" in line
    ]
    assert [line["step"] for line in steps] == [1, 2, 3]
    for line in steps:
        print({name: line[name] for name in line if "mismatch" in name or "router" in name})
        assert line["mismatch/replayed_tokens"] > 0.9
        for way in ("with_replay", "without_replay"):
            assert 0 < line[f"mismatch/{way}_abs_mean"] < ROUNDING_NATS
    assert sum(line["actor/update_steps"] for line in steps) >= 1
    assert any(line.get("actor/router_aux_loss", 0) > 2 for line in steps)
