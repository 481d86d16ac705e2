"""The models of a run and its algorithm: what turns a batch into new weights.

Invariant: each column that the algorithm needs is computed by the model it belongs to, and
no model that it does not need is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from trainer.algorithms import Algorithm, AlgorithmConfig
from trainer.batch import Batch
from trainer.critic import Critic
from trainer.errors import ConfigError
from trainer.model import ModelConfig, vocabulary
from trainer.optimizer import OptimizerConfig
from trainer.parallel import Ranks
from trainer.policy import Policy, Scores
from trainer.token_loss import Metrics
from trainer.update import update_critic, update_policy


class Scorer(Protocol):
    """A model that scores recorded tokens and does not learn."""

    def compute_logprobs(self, batch: Batch, *, temperature: float) -> Scores: ...


@dataclass(frozen=True, slots=True)
class AdaptersOff:
    """The weights that a LoRA policy started from, without a copy of them."""

    policy: Policy

    def compute_logprobs(self, batch: Batch, *, temperature: float) -> Scores:
        with self.policy.adapters_off():
            return self.policy.compute_logprobs(batch, temperature=temperature)


@dataclass(slots=True)
class Learner:
    """Example:
    learner = build_learner(ModelConfig(path=…), OptimizerConfig(), AlgorithmConfig(preset="ppo"))
    learner.compute_logprobs(batch, temperature=1.0)
    learner.compute_values(batch)
    learner.algorithm.compute_advantages(batch)
    metrics = learner.train_step(batch, temperature=1.0, version=0, generator=generator)
    """

    policy: Policy
    algorithm: Algorithm
    critic: Critic | None = None
    reference: Scorer | None = None
    teacher: Scorer | None = None
    steps: int = 0
    """Batches learnt from."""

    def compute_logprobs(self, batch: Batch, *, temperature: float) -> Scores:
        """Sets `prox_logprobs`; the policy's scores before the update."""
        scores = self.policy.compute_logprobs(batch, temperature=temperature)
        batch.prox_logprobs = scores.logprobs
        return scores

    def compute_ref_logprobs(self, batch: Batch, *, temperature: float) -> None:
        """Sets `ref_logprobs` and `teacher_logprobs`, where the algorithm has such models."""
        if self.reference is not None:
            scores = self.reference.compute_logprobs(batch, temperature=temperature)
            batch.ref_logprobs = scores.logprobs
        if self.teacher is not None:
            scores = self.teacher.compute_logprobs(batch, temperature=temperature)
            batch.teacher_logprobs = scores.logprobs

    def compute_values(self, batch: Batch) -> None:
        """Sets `values`, where the algorithm has a critic."""
        if self.critic is not None:
            batch.values = self.critic.compute_values(batch)

    def train_step(
        self, batch: Batch, *, temperature: float, version: int, generator: torch.Generator
    ) -> Metrics:
        """Updates the critic, then the policy (not during the critic's warm-up)."""
        metrics: Metrics = {}
        warming = False
        if self.critic is not None:
            learnt = update_critic(self.critic, self.algorithm, batch, generator=generator)
            metrics |= {f"critic/{name}": value for name, value in learnt.items()}
            settings = self.algorithm.config.critic
            warming = settings is not None and self.steps < settings.warmup_steps
        self.steps += 1
        if warming:
            return metrics
        learnt = update_policy(
            self.policy,
            self.algorithm,
            batch,
            temperature=temperature,
            version=version,
            generator=generator,
        )
        return metrics | {f"actor/{name}": value for name, value in learnt.items()}

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on, for torch's DCP; the frozen models are not in it."""
        state: dict[str, Any] = {
            "policy": self.policy.state_dict(),
            "algorithm": self.algorithm.state_dict(),
            "steps": self.steps,
        }
        return state if self.critic is None else state | {"critic": self.critic.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.policy.load_state_dict(state["policy"])
        self.algorithm.load_state_dict(state["algorithm"])
        self.steps = int(state["steps"])
        if self.critic is not None:
            self.critic.load_state_dict(state["critic"])


def build_learner(
    model: ModelConfig,
    optimizer: OptimizerConfig,
    algorithm: AlgorithmConfig,
    *,
    device: str | torch.device = "cpu",
    ranks: Ranks | None = None,
    batches: int | None = None,
) -> Learner:
    """The models that the algorithm needs, all on `device`. `batches` a run has, for schedules.

    Raises ConfigError for a checkpoint that is none, and a teacher or reference with another
    vocabulary.
    """
    per_batch = algorithm.epochs * algorithm.mini_batches
    total_steps = None if batches is None else batches * per_batch
    policy = Policy(model, optimizer, device=device, ranks=ranks, total_steps=total_steps)
    learner = Learner(policy, Algorithm(algorithm))

    def frozen(path: Path, key: str) -> Policy:
        settings = model.model_copy(update={"path": path, "lora": None})
        other = Policy(settings, device=device, ranks=ranks)
        ours, theirs = vocabulary(policy.model), vocabulary(other.model)
        if ours != theirs:
            raise ConfigError(
                f"{key}: {path} has a vocabulary of {theirs} tokens, the policy one of {ours}; "
                "use a model with the same tokenizer"
            )
        return other

    if algorithm.critic is not None:
        settings = model.model_copy(update={"path": algorithm.critic.path or model.path})
        learner.critic = Critic(
            settings,
            algorithm.critic.optimizer,
            device=device,
            ranks=ranks,
            total_steps=total_steps,
        )
    if algorithm.kl is not None:
        if algorithm.kl.reference is None and model.lora is not None:
            learner.reference = AdaptersOff(policy)
        else:
            path = algorithm.kl.reference or model.path
            learner.reference = frozen(path, "algorithm.kl.reference")
    if algorithm.distillation is not None:
        learner.teacher = frozen(algorithm.distillation.teacher, "algorithm.distillation.teacher")
    return learner
