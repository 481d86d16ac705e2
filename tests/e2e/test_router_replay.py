"""Replayed routing against a real vLLM in bfloat16: the routers no longer make a mismatch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from agent_loop.records import Group, Rollout, RolloutStatus, Task
from agent_loop.trajectory import build_segments
from tests.e2e.routed_sampling import sample_turns
from tests.e2e.test_weight_sync import serving, small_model, url_of
from trainer.batch import Batch, build_batch
from trainer.optimizer import OptimizerConfig
from trainer.policy.model import ModelConfig
from trainer.policy.policy import Policy
from trainer.weight_sync.sync import WeightSync

pytestmark = [pytest.mark.engine, pytest.mark.long]


def mismatches(policy: Policy, sync: WeightSync, url: str) -> tuple[float, float]:
    """Mean |Δ log p| to the engine, with its routing and without."""
    sync.push(policy.named_hf_parameters(), 1)
    measured = policy.compare_routing(sampled_batch(url), temperature=1.0)
    print(measured)
    return (
        measured["mismatch/with_replay_abs_mean"],
        measured["mismatch/without_replay_abs_mean"],
    )


def sampled_batch(url: str) -> Batch:
    task = Task("sampled", {})
    rollouts = [
        Rollout(f"t-{n}", task, RolloutStatus.DONE, 1.0, segments=build_segments([turn]))
        for n, turn in enumerate(sample_turns(url, prompts=16, tokens=100))
    ]
    return build_batch([Group("g", task, rollouts)])


@torch.no_grad()
def test_replay_removes_the_mismatch_of_the_routers(tmp_path: Path) -> None:
    """First with routers that are nearly undecided and experts that differ much, so that rounding
    changes the choice at many tokens; then with the random weights as they are."""
    folder = small_model("qwen3_moe", tmp_path / "model")
    config = ModelConfig(
        path=folder, compute_dtype="bfloat16", router_replay="replay", router_compared=100
    )
    policy = Policy(config, OptimizerConfig())
    for weight in policy.model.parameters():
        weight.copy_(weight.bfloat16())
    before = {name: weight.clone() for name, weight in policy.model.named_parameters()}
    for layer in policy.model.get_decoder().layers:
        layer.mlp.gate.weight.mul_(2**-10)
        layer.mlp.experts.down_proj.mul_(8)
    with serving(folder, "bfloat16", routed_experts=True) as sync:
        url = url_of(folder)
        replayed, routed = mismatches(policy, sync, url)
        assert 10 * replayed < routed
        for name, weight in policy.model.named_parameters():
            weight.copy_(before[name])
        replayed, routed = mismatches(policy, sync, url)
        assert replayed <= routed
