"""Applies a configured algorithm to a batch: rewards → advantages → a loss per token.

Invariant: the loss of a token does not depend on how the batch is cut into micro-batches. Whatever
depends on more than one sequence (baselines, weights, denominators) is computed for the whole batch
before the first micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.algorithms.config import AlgorithmConfig
from trainer.algorithms.kl import K3
from trainer.algorithms.policy_losses import log_linear_prox
from trainer.algorithms.returns import Returns, are_equal
from trainer.algorithms.token_loss import (
    LossFunction,
    Metrics,
    StepWeights,
    TokenLoss,
    ValueLossFunction,
)
from trainer.batch import Batch
from trainer.errors import TrainingError
from trainer.transfers import sent


class Algorithm:
    """A configured algorithm. Before each update, compute only the columns that the properties
    `needs_*` ask for, because each of them costs a forward pass over the whole batch.

    Example:
        algorithm = Algorithm(AlgorithmConfig(preset="dapo"))
        if algorithm.needs_prox:
            batch.prox_logprobs = policy.compute_logprobs(batch, temperature=1.0).logprobs
        algorithm.compute_advantages(batch)
        for sequences in algorithm.mini_batches(batch, generator):
            loss = algorithm.loss(batch, algorithm.weigh(batch, sequences), version=7)
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self.config = config
        self.kl_coefficient = config.kl.coefficient if config.kl else 0.0

    @property
    def needs_prox(self) -> bool:
        """Whether `batch.prox_logprobs` must be computed before the update.

        Only `prox: recompute` needs them. If this is False, the forward pass before the update can
        be omitted. It is not needed to compare trainer and engine either: the metric
        `logp_abs_diff` of the first optimizer step compares them on all of its tokens at no cost.
        """
        return self.config.prox == "recompute"

    @property
    def needs_reference(self) -> bool:
        """Whether `batch.ref_logprobs` must be computed: the algorithm has a KL term."""
        return self.config.kl is not None

    @property
    def needs_teacher(self) -> bool:
        """Whether `batch.teacher_logprobs` must be computed: the algorithm distills a teacher."""
        return self.config.distillation is not None

    @property
    def needs_values(self) -> bool:
        """Whether `batch.values` must be computed: the advantage uses a critic's values."""
        return self.config.advantage.needs_values

    def state_dict(self) -> dict[str, Any]:
        """The state that changes from update to update: an adaptive KL coefficient."""
        return {"kl_coefficient": self.kl_coefficient}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from what `state_dict` returned."""
        if self.config.kl is not None and self.config.kl.adaptive is not None:
            self.kl_coefficient = float(state["kl_coefficient"])

    def compute_advantages(self, batch: Batch) -> Metrics:
        """Sets `batch.advantages` (and `value_targets`) from the shaped rewards.

        Raises TrainingError if the batch is empty, if the policy did not sample it, or if a column
        that the algorithm needs was not computed.
        """
        if not batch.num_tokens:
            raise TrainingError("the batch holds no token to train: no rollout has a reward")
        _refuse_text(batch)
        if self.needs_values:
            _needed(batch.values, "the critic's values")
        shaped, of_trials, metrics = self._shaped_rewards(batch)
        kl_rewards, kl_metrics = self._kl_rewards(batch)
        returns = Returns.of(
            *(batch, shaped, of_trials, kl_rewards),
            shaped_turns=self.config.reward.shaped_turns,
            trained=self._is_trained(batch) & (batch.rollout_tokens > 0),
        )
        advantages, targets = self.config.advantage.estimate(returns)
        advantages = advantages[: batch.num_tokens]  # without those that are too old
        _check_finite(batch, advantages, f"the advantage {self.config.advantage.name}")
        batch.advantages = advantages.float()
        batch.value_targets = None if targets is None else targets.float()
        found = _advantage_metrics(batch, shaped, self._has_signal(batch), self._is_trained(batch))
        return metrics | kl_metrics | found

    def trained_sequences(self, batch: Batch) -> Tensor:
        """Indices of the sequences to train on: all of them, or those of rollouts whose reward, or
        those of whose turns, are compared with different ones."""
        return self._is_trained(batch)[batch.sequence_rollout].nonzero()[:, 0]

    def mini_batches(self, batch: Batch, generator: torch.Generator) -> Iterator[Tensor]:
        """For each optimizer step, the indices of its sequences: whole rollouts in random order."""
        sequences = self.trained_sequences(batch)
        owners = batch.sequence_rollout[sequences]
        rollouts = torch.unique(owners)
        for _ in range(self.config.epochs):
            if self.config.mini_batches == 1:
                order = rollouts
            else:
                order = rollouts[torch.randperm(len(rollouts), generator=generator)]
            for share in order.tensor_split(min(self.config.mini_batches, max(1, len(order)))):
                if len(share):
                    yield sequences[torch.isin(owners, share)]

    def weigh(self, batch: Batch, sequences: Tensor | Sequence[int] | None = None) -> StepWeights:
        """The weights of one optimizer step on `sequences` (None: all that are trained) of the
        whole batch."""
        if sequences is None:
            sequences = self.trained_sequences(batch)
        chosen = torch.isin(batch.sequence, torch.as_tensor(sequences, dtype=torch.int64))
        weights = torch.zeros(batch.num_tokens)
        aggregation = self.config.aggregation
        weights[chosen] = aggregation.weights(batch.sequence[chosen], batch.rollout[chosen])
        share = chosen.float() / max(1, int(chosen.sum()))
        return StepWeights(weights, share, self._kept_of_batch(batch), self.kl_coefficient)

    def loss(
        self, batch: Batch, step: StepWeights | None = None, *, version: int = 0
    ) -> LossFunction:
        """The loss of one optimizer step with these weights (None: `weigh(batch)`):

            Σ_t weight_t · (correction_t · policy_loss_t + β KL_t + …)

        `version` is the version of the policy's weights at the start of the update.
        Raises TrainingError if a column that the algorithm needs was not computed, or if the policy
        did not sample the batch.
        """
        _refuse_text(batch)
        whole = step or self.weigh(batch)
        advantages = _needed(batch.advantages, "advantages")

        def function(logprobs: Tensor, entropy: Tensor, targets: Tensor) -> TokenLoss:
            def of(column: Tensor) -> Tensor:
                return sent(column[targets], logprobs.device)

            sequence, behaviour = of(batch.sequence), of(batch.logprobs)
            prox = self._prox(batch, logprobs, targets, version)
            policy = self.config.loss.losses(logprobs, prox, of(advantages), sequence)
            log_w = prox - behaviour
            kept = of(whole.kept) & self.config.correction.keeps(log_w, sequence, behaviour)
            correction = self.config.correction.weights(log_w, sequence) * kept
            corrected = policy.losses * correction
            losses, terms = corrected, {}
            penalties = self._penalties(batch, logprobs, entropy, targets, whole.kl_coefficient)
            for name, value, coefficient in penalties:
                losses = losses + coefficient * kept * value
                terms[name] = value
            terms |= {
                "policy_kl": K3().divergence(logprobs.detach(), prox),
                "clip_fraction": policy.clipped,
                "correction/weight": correction,
                "correction/rejected": ~kept | (correction == 0),
                "entropy": entropy,
                "logp_abs_diff": (logprobs - behaviour).abs(),
            }
            share, weights = of(whole.share), of(whole.weights)
            metrics = {name: (share * value.detach()).sum() for name, value in terms.items()}
            metrics["policy_loss"] = (weights * corrected).detach().sum()
            weighted = weights * losses
            metrics["loss"] = weighted.detach().sum()
            return TokenLoss(weighted, metrics)

        return function

    def value_loss(self, batch: Batch, step: StepWeights | None = None) -> ValueLossFunction:
        """The critic's loss of one optimizer step with these weights (None: `weigh(batch)`).

        Raises TrainingError if the values or their targets were not computed.
        """
        critic = self.config.critic
        if critic is None:
            raise TrainingError("this algorithm has no critic; set algorithm.critic")
        whole = step or self.weigh(batch)
        old, goal = _needed(batch.values, "values"), _needed(batch.value_targets, "value targets")

        def function(values: Tensor, targets: Tensor) -> TokenLoss:
            def of(column: Tensor) -> Tensor:
                return sent(column[targets], values.device)

            result = critic.losses(values, of(old), of(goal))
            weighted = of(whole.weights) * result.losses
            clipped = (of(whole.share) * result.clipped).sum()
            return TokenLoss(weighted, {"loss": weighted.detach().sum(), "clip_fraction": clipped})

        return function

    def adapt_kl(self, kl: float) -> None:
        """Updates an adaptive coefficient after a batch whose mean divergence was `kl`."""
        if self.config.kl is not None and self.config.kl.adaptive is not None:
            self.kl_coefficient = self.config.kl.adaptive.adapted(self.kl_coefficient, kl)

    def _is_trained(self, batch: Batch) -> Tensor:
        """`[R]` bool: whether `groups` lets the rollout be trained."""
        if self.config.groups == "all":
            return torch.ones(batch.num_rollouts, dtype=torch.bool)
        return self._has_signal(batch)

    def _has_signal(self, batch: Batch) -> Tensor:
        """`[R]` bool: whether the shaped rewards with which the rollout's is compared differ, or
        those of its turns; without the penalty for length, by which no group is chosen (DAPO)."""
        advantage, shaping = self.config.advantage, self.config.reward
        rewards = shaping.shaped(batch.rewards.double())
        of_trials = shaping.shaped(batch.trial_rewards.double())
        returns = Returns.of(batch, rewards, of_trials, shaped_turns=shaping.shaped_turns)
        compared = returns.tree if advantage.compares_trees else batch.group
        if not advantage.credits_turns:
            return ~are_equal(rewards, compared)
        # A reward of turns may be of turns that other policies sampled, or that nothing compares.
        own = of_trials if advantage.compares_within_group else rewards
        return ~are_equal(own, compared) | returns.turns_differ(compared)

    def _shaped_rewards(self, batch: Batch) -> tuple[Tensor, Tensor, Metrics]:
        """`[R]` float64, twice: `rewards` and `trial_rewards`, shaped; and metrics of the
        shaping."""
        shaping = self.config.reward
        shaped = shaping.shaped(batch.rewards.double())
        of_trials = shaping.shaped(batch.trial_rewards.double())
        if shaping.overlong is None:
            return shaped, of_trials, {}
        penalty = shaping.overlong.penalty(batch.sampled_tokens.double())
        metrics = {"reward/overlong_penalty": float(penalty.mean())}
        return shaped + penalty, of_trials + penalty, metrics

    def _kl_rewards(self, batch: Batch) -> tuple[Tensor | None, Metrics]:
        """`[N]`: `−β KL` of each token, or None if the divergence is not in the reward; and its
        metrics."""
        kl = self.config.kl
        if kl is None:
            return None, {}
        reference = _needed(batch.ref_logprobs, "reference log-probabilities")
        start = batch.logprobs if batch.prox_logprobs is None else batch.prox_logprobs
        estimate = kl.estimator.divergence(start, reference)
        coefficient = self.kl_coefficient
        metrics = {"kl/reference": float(estimate.mean()), "kl/coef": coefficient}
        if kl.where == "loss":
            return None, metrics
        self.adapt_kl(metrics["kl/reference"])
        return -coefficient * estimate, metrics

    def _kept_of_batch(self, batch: Batch) -> Tensor:
        """`[N]` bool: False for tokens that a rejection over the whole batch drops, which is over
        the rollouts that are trained."""
        kept = torch.ones(batch.num_tokens, dtype=torch.bool)
        trained = self._is_trained(batch)[batch.rollout]
        for part in self.config.correction.reject:
            if part.over_batch:
                prox = _needed(batch.prox_logprobs, "proximal log-probabilities")
                log_w = (prox - batch.logprobs)[trained]
                sequence, behaviour = batch.sequence[trained], batch.logprobs[trained]
                kept[trained] &= part.keeps_of(log_w, sequence, behaviour)
        return kept

    def _prox(self, batch: Batch, logprobs: Tensor, targets: Tensor, version: int) -> Tensor:
        behaviour = sent(batch.logprobs[targets], logprobs.device)
        match self.config.prox:
            case "recompute":
                prox = _needed(batch.prox_logprobs, "proximal log-probabilities")
                return sent(prox[targets], logprobs.device)
            case "log_linear":
                versions = sent(batch.versions[targets], logprobs.device)
                return log_linear_prox(logprobs, behaviour, versions, version=version)
            case "reuse":
                return logprobs.detach()
            case "behaviour":
                return behaviour

    def _penalties(
        self,
        batch: Batch,
        logprobs: Tensor,
        entropy: Tensor,
        targets: Tensor,
        kl_coefficient: float,
    ) -> Iterator[tuple[str, Tensor, float]]:
        """`(metric, [M] values, coefficient)` of each term that is added to the policy's loss."""
        kl, distillation = self.config.kl, self.config.distillation
        if kl is not None and kl.where == "loss":
            reference = _needed(batch.ref_logprobs, "reference log-probabilities")[targets]
            value = kl.estimator.divergence(logprobs, sent(reference, logprobs.device))
            yield "kl_loss", value, kl_coefficient
        if distillation is not None:
            teacher = _needed(batch.teacher_logprobs, "the teacher's log-probabilities")[targets]
            teacher = sent(teacher, logprobs.device)
            # A teacher at a URL cannot score what a grammar or top-k left.
            unknown = teacher.isnan()
            teacher = torch.where(unknown, logprobs.detach(), teacher)
            value = distillation.estimator.divergence(logprobs, teacher)
            yield "distillation_loss", value.masked_fill(unknown, 0.0), distillation.coefficient
            yield "distillation_left_out", unknown.to(value.dtype), 0.0
        if self.config.entropy_coefficient:
            yield "entropy_bonus", entropy, -self.config.entropy_coefficient


def _refuse_text(batch: Batch) -> None:
    if batch.sources:
        raise TrainingError(
            f"rollout {batch.trial_ids[0]}: its tokens are {batch.sources[0]} text, which the "
            "policy did not sample; only imitation (agentic-train sft) trains them"
        )


def _check_finite(batch: Batch, column: Tensor, what: str) -> None:
    """Raises TrainingError, which names the rollout and the turn: a number is not finite in
    float32."""
    bad = (~torch.isfinite(column.float())).nonzero()
    if len(bad):
        token = int(bad[0])
        raise TrainingError(f"{batch.name(token)}: {what} is {float(column[token])}")


def _needed(column: Tensor | None, what: str) -> Tensor:
    if column is None:
        raise TrainingError(f"the algorithm needs {what}: compute them before this step")
    return column


def _advantage_metrics(
    batch: Batch, shaped: Tensor, has_signal: Tensor, is_trained: Tensor
) -> Metrics:
    """`is_trained` `[R]`: others have no signal, whatever their advantages are."""
    adv = _needed(batch.advantages, "advantages")
    trained = torch.where(is_trained[batch.rollout], adv, 0.0)
    return {
        "reward/shaped_mean": float(shaped.mean()),
        "advantage/mean": float(adv.mean()),
        "advantage/std": float(adv.std(correction=0)),
        "advantage/max": float(trained.max()),
        "advantage/min": float(trained.min()),
        "group/with_signal": float(has_signal.float().mean()),
    }
