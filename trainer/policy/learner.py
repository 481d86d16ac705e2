"""The models of a run and its algorithm: what turns a batch into new weights.

Invariant: each column that the algorithm needs is computed by the model it belongs to, and
no model that it does not need is loaded. Where several ranks train, each call on rank 0's learner
is made by all of them: it tells the others, and they `follow`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch.distributed.checkpoint.api import CheckpointException

from trainer.algorithms import Algorithm, AlgorithmConfig
from trainer.batch import Batch
from trainer.checkpoint import read_state, write_state
from trainer.errors import ConfigError
from trainer.policy.critic import Critic
from trainer.policy.model import ModelConfig, load_settings
from trainer.policy.optimizer import OptimizerConfig
from trainer.policy.parallel import Ranks
from trainer.policy.policy import Policy, Scores
from trainer.policy.token_loss import Metrics
from trainer.policy.update import update_critic, update_policy
from trainer.weight_sync.segment import Named

P = ParamSpec("P")
T = TypeVar("T")


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


@dataclass(frozen=True, slots=True)
class Call:
    """A call on rank 0's learner, as the other ranks hear it.

    Example: Call("compute_values", (batch,), {})
    """

    method: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None


def _together(
    method: Callable[Concatenate[Learner, P], T],
) -> Callable[Concatenate[Learner, P], T]:
    """Rank 0 tells the other ranks of the call before it makes it."""

    @functools.wraps(method)
    def call(self: Learner, /, *args: P.args, **kwargs: P.kwargs) -> T:
        self.policy.ranks.tell(Call(method.__name__, args, kwargs))
        return method(self, *args, **kwargs)

    return call


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

    @_together
    def compute_logprobs(self, batch: Batch, *, temperature: float) -> Scores:
        """Sets `prox_logprobs`; the policy's scores before the update."""
        scores = self.policy.compute_logprobs(batch, temperature=temperature)
        batch.prox_logprobs = scores.logprobs
        return scores

    @_together
    def compute_ref_logprobs(self, batch: Batch, *, temperature: float) -> None:
        """Sets `ref_logprobs` and `teacher_logprobs`, where the algorithm has such models."""
        if self.reference is not None:
            scores = self.reference.compute_logprobs(batch, temperature=temperature)
            batch.ref_logprobs = scores.logprobs
        if self.teacher is not None:
            scores = self.teacher.compute_logprobs(batch, temperature=temperature)
            batch.teacher_logprobs = scores.logprobs

    @_together
    def compute_values(self, batch: Batch) -> None:
        """Sets `values`, where the algorithm has a critic."""
        if self.critic is not None:
            batch.values = self.critic.compute_values(batch)

    @_together
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

    def weights(self) -> Generator[Named]:
        """`(name, tensor)` as in a Hugging Face checkpoint, gathered one by one from all ranks.

        Who does not need all of them closes it, before the next call.
        """
        self.policy.ranks.tell(Call("weights"))
        named = self.policy.named_hf_parameters()
        try:
            for each in named:  # noqa: UP028 (after `yield from` there would be none left to gather)
                yield each
        finally:
            for _ in named:  # the other ranks gather all of them, also where we need no more
                pass

    @_together
    def save_state(self, folder: Path) -> None:
        """Writes `state_dict` to the folder, each rank its own shards."""
        write_state(self.state_dict(), folder)

    @_together
    def load_state(self, folder: Path) -> None:
        """Reads what `save_state` wrote, also with another number of ranks."""
        state = self.state_dict()
        read_state(state, folder)
        self.load_state_dict(state)

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


def follow(learner: Learner) -> None:
    """Makes each call that rank 0 makes, until it tells the end (None)."""
    while (call := learner.policy.ranks.hear()) is not None:
        if call.method == "weights":
            for _ in learner.weights():
                pass
        else:
            # A save that failed did so on every rank; rank 0 says so.
            with contextlib.suppress(CheckpointException):
                getattr(learner, call.method)(*call.args, **call.kwargs)


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

    With several `ranks` each of them builds its own; all but rank 0 then `follow`.
    Raises ConfigError as `check_models`.
    """
    check_models(model, algorithm)
    per_batch = algorithm.epochs * algorithm.mini_batches
    total_steps = None if batches is None else batches * per_batch
    policy = Policy(model, optimizer, device=device, ranks=ranks, total_steps=total_steps)
    learner = Learner(policy, Algorithm(algorithm))

    def frozen(path: Path) -> Policy:
        settings = model.model_copy(update={"path": path, "lora": None})
        return Policy(settings, device=device, ranks=ranks)

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
            learner.reference = frozen(algorithm.kl.reference or model.path)
    if algorithm.distillation is not None:
        learner.teacher = frozen(algorithm.distillation.teacher)
    return learner


def check_models(model: ModelConfig, algorithm: AlgorithmConfig) -> None:
    """What can be known of the models without loading their weights.

    Raises ConfigError for a checkpoint that is none, and a teacher or reference with another
    vocabulary.
    """
    ours = _vocabulary(model.path, "model.path")
    others: dict[str, Path] = {}
    if algorithm.critic is not None and algorithm.critic.path is not None:
        _vocabulary(algorithm.critic.path, "algorithm.critic.path")
    if algorithm.kl is not None and algorithm.kl.reference is not None:
        others["algorithm.kl.reference"] = algorithm.kl.reference
    if algorithm.distillation is not None:
        others["algorithm.distillation.teacher"] = algorithm.distillation.teacher
    for key, path in others.items():
        if (theirs := _vocabulary(path, key)) != ours:
            raise ConfigError(
                f"{key}: {path} has a vocabulary of {theirs} tokens, the policy one of {ours}; "
                "use a model with the same tokenizer"
            )


def _vocabulary(path: Path, key: str) -> int:
    return int(load_settings(path, key).get_text_config().vocab_size)
