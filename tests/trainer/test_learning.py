"""Every preset learns: the policy is rewarded for sampling tokens of half of its vocabulary.

The policy itself gives the tokens, log-probabilities and versions. With staleness, a batch is
trained that number of updates after it was sampled.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agent_loop.records import Group, Rollout, RolloutStatus, Segment, Task
from trainer.algorithms import AlgorithmConfig
from trainer.algorithms.presets import PRESETS
from trainer.batch import build_batch
from trainer.learning import steps
from trainer.learning.models import Models, build_models
from trainer.optimizer_config import OptimizerConfig
from trainer.policy.model_config import ModelConfig
from trainer.policy.scorer import last_hidden
from trainer.rows.packing import Layout, MicroBatch

ANSWER = 6
PROMPT = (5, 6, 7)


@torch.no_grad()
def sample(models: Models, version: int, *, groups: int = 4, size: int = 4) -> list[Group]:
    """Groups of rollouts of the current weights; the reward is the share of tokens below 48."""
    policy = models.policy
    rows = torch.tensor(PROMPT).repeat(groups * size, 1)
    logprobs = torch.zeros(groups * size, len(PROMPT))
    for _ in range(ANSWER):
        count, length = rows.shape
        ends = torch.arange(1, count + 1).repeat_interleave(length) * length
        last = torch.arange(count) * length + length - 1
        positions = torch.arange(length).repeat(count)
        micro = MicroBatch(rows.flatten(), positions, Layout(ends, length), last, last)
        hidden = last_hidden(policy.model.get_decoder(), micro, torch.float32)[last]
        logits = (hidden @ policy.model.get_output_embeddings().weight.T).log_softmax(-1)
        token = torch.multinomial(logits.exp(), 1)
        rows = torch.cat([rows, token], 1)
        logprobs = torch.cat([logprobs, logits.gather(1, token)], 1)
    rollouts = [_rollout(i, row, logp, version) for i, (row, logp) in _rows(rows, logprobs)]
    return [
        Group(str(g), Task(str(g), {}), rollouts[g * size : (g + 1) * size]) for g in range(groups)
    ]


def _rows(rows: torch.Tensor, logprobs: torch.Tensor) -> Any:
    return enumerate(zip(rows.numpy(), logprobs.numpy(), strict=True))


def _rollout(index: int, ids: np.ndarray, logprobs: np.ndarray, version: int) -> Rollout:
    mask = np.arange(len(ids)) >= len(PROMPT)
    segment = Segment(
        parent=-1,
        ids=ids.astype(np.int32),
        mask=mask,
        logprobs=logprobs.astype(np.float32),
        versions=np.where(mask, version, -1).astype(np.int32),
        turns=np.zeros(len(ids), np.int32),
    )
    return Rollout(
        trial_id=str(index),
        task=Task("half", {}),
        status=RolloutStatus.DONE,
        reward=float((ids[mask] < 48).mean()),
        segments=(segment,),
    )


def learn(checkpoint: Path, algorithm: dict[str, Any], *, staleness: int, updates: int) -> float:
    """The mean reward of the last batch."""
    torch.manual_seed(1)
    models = build_models(
        ModelConfig(path=checkpoint),
        OptimizerConfig(lr=3e-3),
        AlgorithmConfig.model_validate(algorithm),
    )
    waiting: deque[list[Group]] = deque()
    generator = torch.Generator().manual_seed(0)
    version = 0
    while version < updates:
        waiting.append(sample(models, version))
        if len(waiting) <= staleness:
            continue
        batch = build_batch(waiting.popleft())
        assert int(batch.versions[0]) == max(0, version - staleness)
        steps.compute_logprobs(models, batch, temperature=1.0)
        steps.compute_ref_logprobs(models, batch, temperature=1.0)
        steps.compute_values(models, batch)
        models.algorithm.compute_advantages(batch)
        steps.update(models, batch, temperature=1.0, version=version, generator=generator)
        version += 1
    return float(build_batch(sample(models, version)).rewards.mean())


@pytest.mark.parametrize(
    "preset",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name == "ppo" else [])  # trains a critic
        for name in sorted(PRESETS)
    ],
)
def test_every_preset_learns(checkpoint: Path, preset: str) -> None:
    changes: dict[str, Any] = {
        "ppo": {"critic": {"optimizer": {"lr": 3e-3}}, "epochs": 3},
        "pass_at_k": {"advantage": {"k": 2, "threshold": 0.7}},
        "sft": {"advantage": {"threshold": 0.7}},
    }
    algorithm = {"preset": preset} | changes.get(preset, {})
    assert learn(checkpoint, algorithm, staleness=0, updates=20) > 0.85


@pytest.mark.parametrize("prox", ["recompute", "log_linear", "reuse"])
def test_decoupled_ppo_learns_from_data_two_versions_old(checkpoint: Path, prox: str) -> None:
    algorithm = {"preset": "decoupled_ppo", "prox": prox}
    assert learn(checkpoint, algorithm, staleness=2, updates=24) > 0.85
