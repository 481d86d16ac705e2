"""FLOPs of a model that is small enough to count by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from agent_loop.records import Group, Rollout, RolloutStatus, Segment, Task
from trainer.batch import build_batch
from trainer.policy.flops import multiplied_weights, training_flops, utilisation
from trainer.policy.model_config import ModelConfig
from trainer.policy.policy import Policy


def test_flops_are_6_per_weight_and_token_plus_attention(checkpoint: Path) -> None:
    model = Policy(ModelConfig(path=checkpoint)).model
    count = 10
    zeros = np.zeros(count, np.int32)
    segment = Segment(-1, zeros, np.arange(count) > 4, zeros.astype(np.float32), zeros, zeros)
    rollout = Rollout("a", Task("a", {}), RolloutStatus.DONE, 1.0, segments=(segment,))
    batch = build_batch([Group("g", rollout.task, [rollout])])
    weights = sum(p.numel() for p in model.parameters())  # tied: the embedding is the output layer
    attention = 12 * 2 * (4 * 8) * count * count / 2
    expected = 6 * weights * count + attention
    assert multiplied_weights(model) == weights
    for passes in (1.0, 2.0):
        found = training_flops(model.config, weights, batch, passes=passes)
        assert found == pytest.approx(passes * expected)


def test_unknown_device_has_no_utilisation() -> None:
    assert utilisation(1e12, 1.0, torch.device("cpu"), 1) is None
