"""A vLLM that is started from an export computes what was trained, for every class of
docs/models.md."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.e2e.test_weight_dtypes import serving, updating
from tests.e2e.test_weight_kinds import LINEAR, NOT_COMPUTED, classes
from tests.e2e.weight_kinds import written
from tests.gpu.vllm_on_gpu import TRAINED
from trainer.checkpoint import _export, as_in_source, with_untrained
from trainer.optimizer_config import OptimizerConfig
from trainer.policy.model_config import ModelConfig
from trainer.policy.policy import Policy
from trainer.weight_sync.probe import probe_batch

pytestmark = [pytest.mark.engine, pytest.mark.long]

MOST = {"float32": 1e-3, "bfloat16": 5e-2}
"""Mean difference of log-probabilities between the two programs, of the largest that updates may
have (`engine.verify`) and of one that bfloat16 gives."""


@pytest.mark.parametrize("title", classes(NOT_COMPUTED))
def test_export_of_every_class_is_the_trained_model_in_vllm(title: str, tmp_path: Path) -> None:
    (architecture,) = (each for each in TRAINED if each.title == title)
    source, exported = tmp_path / "source", tmp_path / "exported"
    dtype = "bfloat16" if architecture.kind in LINEAR else "float32"
    vocabulary = _vocabulary(written(architecture, source, getattr(torch, dtype)))
    ids = np.random.default_rng(0).integers(1, vocabulary, 48).tolist()
    policy = Policy(
        ModelConfig.model_validate({"path": source, "compute_dtype": dtype}), OptimizerConfig()
    )
    before = _logprobs(policy, ids)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            changed = parameter * (1 + 0.3 * torch.randn_like(parameter))
            parameter.copy_(changed.to(getattr(torch, dtype)))  # as an export can hold it
    trained = _logprobs(policy, ids)
    assert np.abs(trained - before).mean() > 2 * MOST[dtype]

    exported.mkdir()
    whole = with_untrained(policy.named_hf_parameters(), source)
    _export(as_in_source(whole, source), source, exported)
    with serving(exported, [dtype]) as urls, updating(*urls) as sync:
        (served,) = sync.control.prompt_logprobs(ids)
    assert np.abs(np.array(served) - trained).mean() <= MOST[dtype]


def _logprobs(policy: Policy, ids: list[int]) -> np.ndarray:
    found = policy.compute_logprobs(probe_batch(ids), temperature=1.0).logprobs
    return found.float().numpy()


def _vocabulary(weights: dict[str, torch.Tensor]) -> int:
    return next(len(each) for name, each in weights.items() if "embed_tokens" in name)
