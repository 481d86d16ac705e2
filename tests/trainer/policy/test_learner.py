"""The models an algorithm needs, and no other; a learner that resumes as if it had not stopped."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.trainer.policy.test_policy import make_batch
from trainer.algorithms import AlgorithmConfig
from trainer.batch import Batch
from trainer.errors import ConfigError
from trainer.policy.learner import AdaptersOff, Learner, build_learner
from trainer.policy.model import LoraSettings, ModelConfig
from trainer.policy.optimizer import OptimizerConfig
from trainer.policy.policy import Policy
from trainer.policy.token_loss import Metrics


def make_learner(checkpoint: Path, *, lora: bool = False, **algorithm: Any) -> Learner:
    return build_learner(
        ModelConfig(path=checkpoint, lora=LoraSettings(rank=2) if lora else None),
        OptimizerConfig(lr=1e-3, schedule="cosine", warmup_steps=2),
        AlgorithmConfig.model_validate(algorithm),
        batches=6,
    )


def learn(learner: Learner, batch: Batch) -> Metrics:
    learner.compute_logprobs(batch, temperature=1.0)
    learner.compute_ref_logprobs(batch, temperature=1.0)
    learner.compute_values(batch)
    learner.algorithm.compute_advantages(batch)
    generator = torch.Generator().manual_seed(learner.steps)
    return learner.train_step(batch, temperature=1.0, version=0, generator=generator)


def test_only_the_models_that_are_needed_are_loaded(checkpoint: Path) -> None:
    plain = make_learner(checkpoint)
    assert (plain.critic, plain.reference, plain.teacher) == (None, None, None)
    assert make_learner(checkpoint, preset="ppo").critic is not None
    assert isinstance(make_learner(checkpoint, preset="grpo").reference, Policy)
    assert isinstance(make_learner(checkpoint, preset="grpo", lora=True).reference, AdaptersOff)


@pytest.mark.parametrize("lora", [False, True], ids=["copy", "lora"])
def test_the_reference_stays_where_training_started(checkpoint: Path, lora: bool) -> None:
    learner, batch = make_learner(checkpoint, preset="grpo", lora=lora), make_batch(1)
    learn(learner, batch)
    assert batch.ref_logprobs is not None
    first = batch.ref_logprobs.clone()
    for _ in range(3):
        metrics = learn(learner, batch)
    torch.testing.assert_close(batch.ref_logprobs, first, atol=1e-6, rtol=0)
    assert metrics["actor/kl_loss"] > 0


def test_distillation_moves_the_policy_to_its_teacher(checkpoint: Path, tmp_path: Path) -> None:
    torch.manual_seed(7)
    teacher = AutoModelForCausalLM.from_pretrained(checkpoint)
    for parameter in teacher.parameters():
        parameter.data += 0.01 * torch.randn_like(parameter)
    teacher.save_pretrained(tmp_path)
    learner = make_learner(
        checkpoint, distillation={"teacher": tmp_path, "coefficient": 10.0}, prox="recompute"
    )
    batch = make_batch(1)
    divergences = [learn(learner, batch)["actor/distillation_loss"] for _ in range(6)]
    assert divergences[-1] < 0.8 * divergences[0]


def test_a_teacher_with_another_vocabulary_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    settings = AutoConfig.from_pretrained(checkpoint)
    settings.vocab_size = 64
    AutoModelForCausalLM.from_config(settings).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="a vocabulary of 64 tokens, the policy one of 96"):
        make_learner(checkpoint, distillation={"teacher": tmp_path})


def test_the_critic_warms_up_alone(checkpoint: Path) -> None:
    learner = make_learner(checkpoint, preset="ppo", critic={"warmup_steps": 1})
    first, second = (learn(learner, make_batch(2)) for _ in range(2))
    assert "actor/loss" not in first
    assert "critic/loss" in first
    assert "actor/loss" in second


def test_a_restored_learner_goes_on_as_the_one_that_was_saved(checkpoint: Path) -> None:
    algorithm: dict[str, Any] = {
        "preset": "ppo",
        "mini_batches": 2,
        "kl": {"adaptive": {"target": 0.01}},
    }
    whole, batch = make_learner(checkpoint, **algorithm), make_batch(3)
    learn(whole, batch)
    file = io.BytesIO()
    torch.save(whole.state_dict(), file)
    restored = make_learner(checkpoint, **algorithm)
    restored.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
    assert learn(restored, make_batch(3)) == learn(whole, batch)
    for (name, a), (_, b) in zip(
        restored.policy.named_hf_parameters(), whole.policy.named_hf_parameters(), strict=True
    ):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("where", ["loss", "reward"])
def test_an_adaptive_coefficient_follows_the_divergence(checkpoint: Path, where: str) -> None:
    kl = {"coefficient": 0.1, "where": where, "adaptive": {"target": 1e-9, "horizon": 2}}
    learner, coefficients = make_learner(checkpoint, kl=kl), []
    for _ in range(4):
        learn(learner, make_batch(1))
        coefficients.append(learner.algorithm.kl_coefficient)
    assert coefficients[-1] > coefficients[0]
