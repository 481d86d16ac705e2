"""One configured algorithm, applied to a batch: rewards → advantages → a loss per token.

Invariant: what the loss of a token is does not depend on how the batch was cut into micro-batches.
Everything that takes more than a sequence to know (baselines, weights, denominators) is computed
for the whole batch, before the first of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.algorithms import advantages, shaping
from trainer.algorithms.aggregation import token_weights
from trainer.algorithms.config import AlgorithmConfig, Gae, SecondMoment
from trainer.algorithms.kl import adapted, divergence
from trainer.algorithms.policy_losses import log_linear_prox, m2_mask
from trainer.algorithms.value_losses import clipped_value_loss
from trainer.batch import Batch
from trainer.errors import TrainingError
from trainer.policy.token_loss import LossFunction, Metrics, TokenLoss, ValueLossFunction


class Algorithm:
    """Example:
    algorithm = Algorithm(AlgorithmConfig(preset="dapo"))
    algorithm.compute_advantages(batch)
    for sequences in algorithm.mini_batches(batch, generator):
        loss = algorithm.loss(batch, sequences, version=7)
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self.config = config
        self.kl_coefficient = config.kl.coefficient if config.kl else 0.0

    @property
    def needs_prox(self) -> bool:
        """Whether `batch.prox_logprobs` must be computed before the update."""
        return self.config.prox == "recompute"

    @property
    def needs_reference(self) -> bool:
        return self.config.kl is not None

    @property
    def needs_teacher(self) -> bool:
        return self.config.distillation is not None

    @property
    def needs_values(self) -> bool:
        return self.config.critic is not None

    def state_dict(self) -> dict[str, Any]:
        return {"kl_coefficient": self.kl_coefficient}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kl_coefficient = float(state["kl_coefficient"])

    def compute_advantages(self, batch: Batch) -> Metrics:
        """Fills `batch.advantages` (and `value_targets`) from its rewards, after shaping them.

        Raises TrainingError for an empty batch, and for columns that the algorithm needs and
        that were not computed.
        """
        if not batch.num_tokens:
            raise TrainingError("the batch holds no token to train: no rollout has a reward")
        shaped, metrics = self._shape(batch)
        returns = batch.returns + (shaped - batch.rewards)[batch.rollout]
        if isinstance(self.config.advantage, Gae):
            self._gae(batch, returns, self.config.advantage)
        else:
            outcome = self.config.advantage.outcome(shaped, batch.group, batch.rollout_tokens)
            if isinstance(outcome, Tensor):
                batch.advantages = outcome[batch.rollout]
            else:
                mean, scale = (part[batch.rollout] for part in outcome)
                batch.advantages = (returns - mean) * scale
        return metrics | _advantage_metrics(batch, shaped)

    def trained_sequences(self, batch: Batch) -> Tensor:
        """Indices of the sequences to train on: all, or those of groups with a signal."""
        if self.config.groups == "all":
            return torch.arange(len(batch.sequences))
        signal = shaping.has_signal(batch.rewards, batch.group)
        return signal[batch.sequence_rollout].nonzero()[:, 0]

    def mini_batches(self, batch: Batch, generator: torch.Generator) -> Iterator[Tensor]:
        """Per optimizer step the indices of its sequences, whole rollouts in random order."""
        sequences = self.trained_sequences(batch)
        owners = batch.sequence_rollout[sequences]
        rollouts = torch.unique(owners)
        for _ in range(self.config.epochs):
            if self.config.mini_batches == 1:
                order = rollouts
            else:
                order = rollouts[torch.randperm(len(rollouts), generator=generator)]
            for share in order.tensor_split(self.config.mini_batches):
                if len(share):
                    yield sequences[torch.isin(owners, share)]

    def loss(
        self, batch: Batch, sequences: Tensor | Sequence[int] | None = None, *, version: int = 0
    ) -> LossFunction:
        """The loss of one optimizer step on `sequences` (None: all that are trained).

        `version` is that of the weights at the start of the update.
        Raises TrainingError when a column that the algorithm needs was not computed.
        """
        chosen = self._chosen(batch, sequences)
        weights, share = self._weights(batch, chosen), chosen.float() / max(1, int(chosen.sum()))
        adv = _needed(batch.advantages, "advantages")
        moment_mask = self._moment_mask(batch)

        def function(logprobs: Tensor, entropy: Tensor, targets: Tensor) -> TokenLoss:
            device, sequence = logprobs.device, batch.sequence[targets].to(logprobs.device)
            behaviour = batch.logprobs[targets].to(device)
            prox = self._prox(batch, logprobs, targets, version)
            policy = self.config.loss.losses(logprobs, prox, adv[targets].to(device), sequence)
            correction = self._correction(prox - behaviour, sequence)
            if moment_mask is not None:
                correction = correction * moment_mask[targets].to(device)
            losses, terms = policy.losses * correction, {}
            for name, value, coefficient in self._penalties(batch, logprobs, entropy, targets):
                losses = losses + coefficient * value
                terms[name] = value
            here, uniform = weights[targets].to(device), share[targets].to(device)
            log_ratio = (logprobs - prox).detach()
            terms |= {
                "policy_kl": divergence(log_ratio, torch.zeros_like(log_ratio), "k3"),
                "clip_fraction": policy.clipped,
                "correction/weight": correction,
                "correction/rejected": correction == 0,
                "entropy": entropy,
                "logp_abs_diff": (logprobs - behaviour).abs(),
            }
            metrics = {name: (uniform * value.detach()).sum() for name, value in terms.items()}
            metrics["policy_loss"] = (here * policy.losses * correction).detach().sum()
            weighted = here * losses
            metrics["loss"] = weighted.detach().sum()
            return TokenLoss(weighted, metrics)

        return function

    def value_loss(
        self, batch: Batch, sequences: Tensor | Sequence[int] | None = None
    ) -> ValueLossFunction:
        """The critic's loss of one optimizer step on `sequences`.

        Raises TrainingError when values or their targets were not computed.
        """
        settings = self.config.critic
        if settings is None:
            raise TrainingError("this algorithm has no critic")
        chosen = self._chosen(batch, sequences)
        weights, share = self._weights(batch, chosen), chosen.float() / max(1, int(chosen.sum()))
        old, goal = _needed(batch.values, "values"), _needed(batch.value_targets, "value targets")

        def function(values: Tensor, targets: Tensor) -> TokenLoss:
            device = values.device
            result = clipped_value_loss(
                values,
                old[targets].to(device),
                goal[targets].to(device),
                clip=settings.clip,
                huber_delta=settings.huber_delta,
            )
            weighted = weights[targets].to(device) * result.losses
            clipped = (share[targets].to(device) * result.clipped).sum()
            metrics = {"loss": weighted.detach().sum(), "clip_fraction": clipped}
            return TokenLoss(weighted, metrics)

        return function

    def adapt_kl(self, kl: float) -> None:
        """Moves an adaptive coefficient after a batch whose mean divergence was `kl`."""
        if self.config.kl is not None and self.config.kl.adaptive is not None:
            target, horizon = self.config.kl.adaptive.target, self.config.kl.adaptive.horizon
            self.kl_coefficient = adapted(self.kl_coefficient, kl, target=target, horizon=horizon)

    def _shape(self, batch: Batch) -> tuple[Tensor, Metrics]:
        settings, metrics = self.config.reward, Metrics()
        shaped = shaping.affine_clip(
            batch.rewards,
            bias=settings.bias,
            scale=settings.scale,
            low=settings.low,
            high=settings.high,
        )
        if settings.overlong is not None:
            penalty = shaping.overlong_penalty(
                batch.rollout_tokens, **settings.overlong.model_dump()
            )
            shaped = shaped + penalty
            metrics["reward/overlong_penalty"] = float(penalty.mean())
        kl = self.config.kl
        if kl is not None:
            reference = _needed(batch.ref_logprobs, "reference log-probabilities")
            start = batch.prox_logprobs if batch.prox_logprobs is not None else batch.logprobs
            estimate = divergence(start, reference, kl.estimator)
            metrics |= {"kl/reference": float(estimate.mean()), "kl/coef": self.kl_coefficient}
            if kl.where == "reward":
                shaped = shaped + shaping.kl_in_reward(
                    estimate,
                    batch.rollout,
                    coefficient=self.kl_coefficient,
                    rollouts=batch.num_rollouts,
                )
                self.adapt_kl(metrics["kl/reference"])
        return shaped, metrics

    def _gae(self, batch: Batch, returns: Tensor, settings: Gae) -> None:
        values = _needed(batch.values, "values")
        rewards = shaping.turn_rewards(returns, batch.sequence, batch.turns)
        if settings.level == "turn":
            adv, targets = advantages.gae_by_turn(
                rewards, values, batch.sequence, batch.turns, gamma=settings.gamma, lam=settings.lam
            )
        else:
            adv, targets = advantages.gae(
                rewards, values, batch.sequence, gamma=settings.gamma, lam=settings.lam
            )
        if settings.normalise == "rollout":
            weights = token_weights("rollout_mean", batch.sequence, batch.rollout)
            adv = advantages.whiten(adv, weights)
        batch.advantages, batch.value_targets = adv, targets

    def _chosen(self, batch: Batch, sequences: Tensor | Sequence[int] | None) -> Tensor:
        """`[N]` bool: the tokens of the step."""
        if sequences is None:
            sequences = self.trained_sequences(batch)
        return torch.isin(batch.sequence, torch.as_tensor(sequences, dtype=torch.int64))

    def _weights(self, batch: Batch, chosen: Tensor) -> Tensor:
        weights = torch.zeros(batch.num_tokens)
        weights[chosen] = token_weights(
            self.config.aggregation,
            batch.sequence[chosen],
            batch.rollout[chosen],
            max_tokens=self.config.aggregation_tokens,
        )
        return weights

    def _moment_mask(self, batch: Batch) -> Tensor | None:
        for part in self.config.correction.reject:
            if isinstance(part, SecondMoment):
                prox = _needed(batch.prox_logprobs, "proximal log-probabilities")
                return m2_mask(batch.logprobs, prox, threshold=part.threshold)
        return None

    def _prox(self, batch: Batch, logprobs: Tensor, targets: Tensor, version: int) -> Tensor:
        behaviour = batch.logprobs[targets].to(logprobs.device)
        match self.config.prox:
            case "recompute":
                prox = _needed(batch.prox_logprobs, "proximal log-probabilities")
                return prox[targets].to(logprobs.device)
            case "log_linear":
                versions = batch.versions[targets].to(logprobs.device)
                return log_linear_prox(logprobs, behaviour, versions, version=version)
            case "reuse":
                return logprobs.detach()
            case "behaviour":
                return behaviour

    def _correction(self, log_w: Tensor, sequence: Tensor) -> Tensor:
        """`[M]`, what the policy loss is multiplied by; 0 where a token is rejected."""
        settings = self.config.correction
        weights = torch.ones_like(log_w)
        if settings.weight is not None:
            weights = settings.weight.weights(log_w, sequence)
        for part in settings.reject:
            if not isinstance(part, SecondMoment):
                weights = weights * part.keeps(log_w, sequence)
        return weights

    def _penalties(
        self, batch: Batch, logprobs: Tensor, entropy: Tensor, targets: Tensor
    ) -> Iterator[tuple[str, Tensor, float]]:
        """`(metric, [M] values, coefficient)` of what is added to the policy's loss."""
        kl, distillation = self.config.kl, self.config.distillation
        if kl is not None and kl.where == "loss":
            reference = _needed(batch.ref_logprobs, "reference log-probabilities")[targets]
            value = divergence(logprobs, reference.to(logprobs.device), kl.estimator)
            yield "kl_loss", value, self.kl_coefficient
        if distillation is not None:
            teacher = _needed(batch.teacher_logprobs, "the teacher's log-probabilities")[targets]
            value = divergence(logprobs, teacher.to(logprobs.device), distillation.estimator)
            yield "distillation_loss", value, distillation.coefficient
        if self.config.entropy_coefficient:
            yield "entropy_bonus", entropy, -self.config.entropy_coefficient


def _needed(column: Tensor | None, what: str) -> Tensor:
    if column is None:
        raise TrainingError(f"the algorithm needs {what}: compute them before this step")
    return column


def _advantage_metrics(batch: Batch, shaped: Tensor) -> Metrics:
    adv = _needed(batch.advantages, "advantages")
    signal = shaping.has_signal(batch.rewards, batch.group)
    return {
        "reward/shaped_mean": float(shaped.mean()),
        "advantage/mean": float(adv.mean()),
        "advantage/std": float(adv.std(correction=0)),
        "advantage/max": float(adv.max()),
        "advantage/min": float(adv.min()),
        "group/with_signal": float(signal.float().mean()),
    }
