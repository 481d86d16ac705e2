"""Only the models that an algorithm needs are loaded; restored models train like the saved ones."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.trainer.policy.test_policy import make_batch
from trainer.algorithms import AlgorithmConfig
from trainer.algorithms.token_loss import Metrics
from trainer.batch import Batch
from trainer.errors import ConfigError
from trainer.learning import steps
from trainer.learning.models import AdaptersOff, Models, build_models
from trainer.optimizer_config import OptimizerConfig
from trainer.policy.model_config import LoraSettings, ModelConfig
from trainer.policy.policy import Policy


def make_models(checkpoint: Path, *, lora: bool = False, **algorithm: Any) -> Models:
    return build_models(
        ModelConfig(path=checkpoint, lora=LoraSettings(rank=2) if lora else None),
        OptimizerConfig(lr=1e-3, schedule="cosine", warmup_steps=2),
        AlgorithmConfig.model_validate(algorithm),
        batches=6,
    )


def train(models: Models, batch: Batch) -> Metrics:
    steps.compute_logprobs(models, batch, temperature=1.0)
    steps.compute_ref_logprobs(models, batch, temperature=1.0)
    steps.compute_values(models, batch)
    models.algorithm.compute_advantages(batch)
    generator = torch.Generator().manual_seed(models.updates)
    return steps.update(models, batch, temperature=1.0, version=0, generator=generator)


def test_only_models_that_the_algorithm_needs_are_loaded(checkpoint: Path) -> None:
    plain = make_models(checkpoint)
    assert (plain.critic, plain.reference, plain.teacher) == (None, None, None)
    assert make_models(checkpoint, preset="ppo").critic is not None
    assert isinstance(make_models(checkpoint, preset="grpo").reference, Policy)
    assert isinstance(make_models(checkpoint, preset="grpo", lora=True).reference, AdaptersOff)


@pytest.mark.parametrize("lora", [False, True], ids=["copy", "lora"])
def test_reference_keeps_the_initial_weights(checkpoint: Path, lora: bool) -> None:
    models, batch = make_models(checkpoint, preset="grpo", lora=lora), make_batch(1)
    train(models, batch)
    assert batch.ref_logprobs is not None
    first = batch.ref_logprobs.clone()
    for _ in range(3):
        metrics = train(models, batch)
    torch.testing.assert_close(batch.ref_logprobs, first, atol=1e-6, rtol=0)
    assert metrics["actor/kl_loss"] > 0


def test_distillation_moves_the_policy_to_its_teacher(checkpoint: Path, tmp_path: Path) -> None:
    torch.manual_seed(7)
    teacher = AutoModelForCausalLM.from_pretrained(checkpoint)
    for parameter in teacher.parameters():
        parameter.data += 0.01 * torch.randn_like(parameter)
    teacher.save_pretrained(tmp_path)
    models = make_models(
        checkpoint, distillation={"teacher": str(tmp_path), "coefficient": 10.0}, prox="recompute"
    )
    batch = make_batch(1)
    divergences = [train(models, batch)["actor/distillation_loss"] for _ in range(6)]
    assert divergences[-1] < 0.8 * divergences[0]


def test_teacher_with_another_vocabulary_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    settings = AutoConfig.from_pretrained(checkpoint)
    settings.vocab_size = 64
    AutoModelForCausalLM.from_config(settings).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="a vocabulary of 64 tokens, but the policy has 96"):
        make_models(checkpoint, distillation={"teacher": str(tmp_path)})


def test_only_the_critic_is_trained_during_its_warm_up(checkpoint: Path) -> None:
    models = make_models(checkpoint, preset="ppo", critic={"warmup_steps": 1})
    first, second = (train(models, make_batch(2)) for _ in range(2))
    assert "actor/loss" not in first
    assert "critic/loss" in first
    assert "actor/loss" in second


def test_schedule_of_the_policy_begins_after_the_warm_up_of_its_critic(checkpoint: Path) -> None:
    linear = OptimizerConfig(schedule="linear", lr=1e-3)
    critic = {"warmup_steps": 2, "optimizer": linear.model_dump()}
    algorithm = AlgorithmConfig.model_validate({"preset": "ppo", "critic": critic})
    models = build_models(ModelConfig(path=checkpoint), linear, algorithm, batches=6)
    metrics = [train(models, make_batch(1)) for _ in range(6)]
    rates = [each["actor/lr"] for each in metrics if "actor/lr" in each]
    assert rates == pytest.approx([1e-3, 2e-3 / 3, 1e-3 / 3, 0])
    of_critic = [each["critic/lr"] for each in metrics]
    assert of_critic == pytest.approx([1e-3 * left / 5 for left in range(5, -1, -1)])


def test_restored_models_train_exactly_like_the_saved_ones(checkpoint: Path) -> None:
    algorithm: dict[str, Any] = {
        "preset": "ppo",
        "mini_batches": 2,
        "kl": {"adaptive": {"target": 0.01}},
    }
    whole, batch = make_models(checkpoint, **algorithm), make_batch(3)
    train(whole, batch)
    file = io.BytesIO()
    torch.save(whole.state_dict(), file)
    restored = make_models(checkpoint, **algorithm)
    restored.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
    assert train(restored, make_batch(3)) == train(whole, batch)
    for (name, a), (_, b) in zip(
        restored.policy.named_hf_parameters(), whole.policy.named_hf_parameters(), strict=True
    ):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("where", ["loss", "reward"])
def test_adaptive_coefficient_follows_the_divergence(checkpoint: Path, where: str) -> None:
    kl = {"coefficient": 0.1, "where": where, "adaptive": {"target": 1e-9, "horizon": 2}}
    models, coefficients = make_models(checkpoint, kl=kl), []
    for _ in range(4):
        train(models, make_batch(1))
        coefficients.append(models.algorithm.kl_coefficient)
    assert coefficients[-1] > coefficients[0]
