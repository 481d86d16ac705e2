"""Rewards → advantages: one class per estimator, with its formula, its settings and its source.

Invariant: every baseline and every scale counts rollouts, never tokens, turns or sequences. If the
baseline is the group's own, equal returns and groups of one rollout have advantages of exactly 0.
No advantage is infinite. The formulas below are written with a reward `R`; they apply to the return
of every token, and baselines and scales are computed from the same returns (`returns.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from agent_loop.records import REWARD_ROUNDING
from trainer.algorithms.aggregation import RolloutMean
from trainer.algorithms.part import MAX_COUNT, FunctionPart, NamedPart, Parts, column_of
from trainer.algorithms.returns import Returns, group_max, group_size, group_sum
from trainer.algorithms.turn_values import continuation_advantages

Eps = Annotated[float, Field(ge=0)]


class Estimate(NamedTuple):
    """Example: Estimate(advantages=[.5 -.25 -.5])"""

    advantages: Tensor
    """`[N]`, advantage of each trained token."""
    value_targets: Tensor | None = None
    """`[N]`, the values that the critic learns to predict; None without a critic."""


class Advantage(NamedPart, ABC):
    """An estimator of advantages from returns. A subclass declares its settings as fields."""

    needs_values: ClassVar[bool] = False
    """Whether the estimator uses a critic's values; the algorithm then needs `critic`."""
    compares_within_group: ClassVar[bool] = True
    """Whether the baseline is the group's own, so that a group of one rollout teaches nothing."""
    compares_trees: ClassVar[bool] = False
    """Whether a rollout is also compared with those that branch from it."""
    credits_turns: ClassVar[bool] = True
    """Whether the rewards of single turns count."""

    @abstractmethod
    def estimate(self, returns: Returns) -> Estimate:
        """The advantage of every trained token."""


def group_mean(values: Tensor, group: Tensor, _tokens: Tensor) -> Tensor:
    """`μ_g`"""
    return group_sum(values, group) / group_size(group)


def mean_of_others(values: Tensor, group: Tensor, _tokens: Tensor) -> Tensor:
    """`mean_{j≠i} R_j`; the value itself if the group has no other rollout."""
    size = group_size(group)
    others = (group_sum(values, group) - values) / (size - 1).clamp(min=1)
    return torch.where(size > 1, others, values)


def mean_by_tokens(values: Tensor, group: Tensor, tokens: Tensor) -> Tensor:
    """`Σ R·len / Σ len`, `len` in trained tokens."""
    return group_sum(values * tokens, group) / group_sum(tokens, group)


class Judging(Advantage):
    """An advantage that knows right and wrong rollouts only."""

    threshold: float = 0.5
    """Minimum reward of a correct rollout (`pass_at_k`), or of an imitated one (`accepted`)."""


class Normalising(Advantage):
    """An advantage that is divided by a standard deviation."""

    eps: Eps = 1e-6
    """ε, as a share of the largest deviation: of the group, or else of the batch."""


class Grpo(Normalising):
    """`(R − μ_g) / (σ_g + ε)`. DeepSeekMath, arXiv 2402.03300."""

    name: Literal["grpo"] = "grpo"

    def estimate(self, returns: Returns) -> Estimate:
        centred = returns.centred(group_mean)
        return Estimate(returns.normalised(centred, centred, eps=self.eps))


class DrGrpo(Advantage):
    """`R − μ_g`. Understanding R1-Zero-like training, arXiv 2503.20783."""

    name: Literal["dr_grpo"] = "dr_grpo"

    def estimate(self, returns: Returns) -> Estimate:
        return Estimate(returns.centred(group_mean))


class Rloo(Advantage):
    """`R_i − mean_{j≠i} R_j`, which is `(R_i − μ_g) · n / (n − 1)`. arXiv 2402.14740."""

    name: Literal["rloo"] = "rloo"

    def estimate(self, returns: Returns) -> Estimate:
        return Estimate(returns.centred(mean_of_others))


class ReinforcePp(Normalising):
    """`(R − μ) / (σ + ε)` over the whole batch. REINFORCE++, arXiv 2501.03262."""

    name: Literal["reinforce++"] = "reinforce++"
    compares_within_group: ClassVar[bool] = False

    def estimate(self, returns: Returns) -> Estimate:
        batch = returns.whole_batch
        centred = returns.centred(group_mean, batch)
        return Estimate(returns.normalised(centred, centred, batch, eps=self.eps))


class ReinforcePpBaseline(Normalising):
    """`(R − μ_g) / (σ(R − μ_g) + ε)`, σ over the batch. REINFORCE++-baseline, arXiv 2501.03262."""

    name: Literal["reinforce++_baseline"] = "reinforce++_baseline"

    def estimate(self, returns: Returns) -> Estimate:
        centred = returns.centred(group_mean)
        return Estimate(returns.normalised(centred, centred, returns.whole_batch, eps=self.eps))


class LitePpo(Normalising):
    """`(R − μ_g) / (σ_batch + ε)`. Tricks or traps (Lite PPO), arXiv 2508.08221."""

    name: Literal["lite_ppo"] = "lite_ppo"

    def estimate(self, returns: Returns) -> Estimate:
        batch = returns.whole_batch
        deviations = returns.centred(group_mean, batch)
        centred = returns.centred(group_mean)
        return Estimate(returns.normalised(centred, deviations, batch, eps=self.eps))


class Opo(Advantage):
    """`R − Σ R·len / Σ len` over the group, `len` in trained tokens. arXiv 2505.23585."""

    name: Literal["opo"] = "opo"

    def estimate(self, returns: Returns) -> Estimate:
        return Estimate(returns.centred(mean_by_tokens))


class Gpg(Advantage):
    """`α (R − μ_g)`, α the trained rollouts over those in groups with differing returns.

    Group policy gradient, arXiv 2504.02546: α compensates for the rollouts without a gradient that
    the mean over all rollouts counts. With `groups: with_signal` the mean does not count them, and
    α is 1.
    """

    name: Literal["gpg"] = "gpg"

    def estimate(self, returns: Returns) -> Estimate:
        centred = returns.centred(group_mean)
        differs = torch.zeros_like(returns.rewards)
        differs = differs.scatter_reduce(0, returns.rollout, centred.abs(), "amax")
        useful = group_max(differs, returns.group) > 0
        trained = torch.ones_like(useful) if returns.trained is None else returns.trained
        alpha = trained.sum() / (useful & trained).sum().clamp(min=1)
        return Estimate(centred * alpha)


class PassAtK(Judging):
    """Maximises pass@k of a group of N rollouts with c correct ones. arXiv 2508.10751.

    `ρ = 1 − C(N−c, k) / C(N, k)`, `σ = √(ρ (1 − ρ))`, for a correct rollout `(1 − ρ) / σ`, else
    `(1 − ρ − C(N−c−1, k−1) / C(N−1, k−1)) / σ`; 0 if σ is 0. In a group of fewer than `k` rollouts,
    their number replaces `k`. A turn gets its share of the rollout's advantage. Rewards of single
    turns are ignored, unless the trial has no other; then their sum is its reward. The KL
    divergence is ignored.
    """

    name: Literal["pass_at_k"] = "pass_at_k"
    credits_turns: ClassVar[bool] = False
    k: int = Field(4, ge=1, le=MAX_COUNT)
    """Number of attempts that pass@k considers."""

    def estimate(self, returns: Returns) -> Estimate:
        size = group_size(returns.group)
        correct = (returns.rewards >= self.threshold).double()
        wrong = size - group_sum(correct, returns.group)
        draws = size.clamp(max=self.k)
        none_correct = _choose_ratio(wrong, size, draws)
        sigma = ((1 - none_correct) * none_correct).sqrt()
        others_wrong = _choose_ratio(wrong - 1, size - 1, draws - 1)
        raw = torch.where(correct > 0, none_correct, none_correct - others_wrong)
        advantages = torch.where(sigma > 0, raw / sigma.clamp(min=1e-12), torch.zeros_like(raw))
        return Estimate(returns.share * advantages[returns.rollout])


class Tree(Advantage):
    """Turn by turn, from Monte-Carlo values of the states between them; see `turn_values.py`.

    For rollouts that branch from others (`examples/branching`); without branches it is `rloo`. A
    turn gets its share of the advantage. Rewards of single turns are ignored, unless the trial has
    no other; then their sum is its reward. The KL divergence is ignored. arXiv
    2604.11037, 2509.21240.
    """

    name: Literal["tree"] = "tree"
    compares_trees: ClassVar[bool] = True
    credits_turns: ClassVar[bool] = False

    def estimate(self, returns: Returns) -> Estimate:
        columns = (returns.rewards, returns.group, returns.trunk, returns.first_turn)
        found = continuation_advantages(*(column.tolist() for column in columns))
        advantages = torch.zeros_like(returns.share)
        for part in sorted(found, key=lambda part: part.first_turn):
            own = (returns.rollout == part.rollout) & (returns.turns >= part.first_turn)
            advantages[own] = found[part]
        return Estimate(returns.share * advantages)


class Accepted(Judging):
    """1 for a rollout whose reward is at least `threshold`, else 0: rejection-sampled fine-tuning
    (RAFT, arXiv 2304.06767).
    """

    name: Literal["accepted"] = "accepted"
    compares_within_group: ClassVar[bool] = False
    credits_turns: ClassVar[bool] = False

    def estimate(self, returns: Returns) -> Estimate:
        return Estimate((returns.rewards >= self.threshold).double()[returns.rollout])


class NoAdvantage(Advantage):
    """0 for every token: nothing is learnt from rewards, only from `algorithm.distillation`."""

    name: Literal["none"] = "none"
    compares_within_group: ClassVar[bool] = False

    def estimate(self, returns: Returns) -> Estimate:
        return Estimate(torch.zeros_like(returns.rewards)[returns.rollout])


class Gae(Advantage):
    """`A_t = δ_t + γλ A_{t+1}`, `δ_t = r_t + γ V_{t+1} − V_t`. Needs `algorithm.critic`.

    Generalized advantage estimation, arXiv 1506.02438, over the trained tokens (or turns) of each
    sequence; the tokens between them (such as a tool's output) are skipped. The critic's target is
    `A_t + V_t`. Returns are first converted to rewards that sum to them: the reward of a turn is on
    its last token, and the KL divergence is a reward of each token.

    VAPO (arXiv 2504.05118) is `length_alpha: 0.05` and `target_lam: 1`.
    """

    name: Literal["gae"] = "gae"
    needs_values: ClassVar[bool] = True
    compares_within_group: ClassVar[bool] = False
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per token or per turn."""
    lam: float = Field(0.95, ge=0, le=1)
    """λ: with 0 only the critic's values count, with 1 only the returns."""
    length_alpha: float | None = Field(None, gt=0)
    """VAPO (arXiv 2504.05118): λ of the advantages in a sequence of `l` actions is
    `1 - 1 / (length_alpha * l)`, at least 0, instead of `lam`. None: it is `lam`."""
    target_lam: float | None = Field(None, ge=0, le=1)
    """λ of the critic's targets; None: that of the advantages."""
    level: Literal["token", "turn"] = "token"
    """What counts as one action: a token or a whole turn."""
    normalise: Literal["rollout", "none"] = "rollout"
    """`rollout`: advantages are scaled to mean 0 and variance 1 over the batch, with the same
    weight for each rollout. `none`: they are not scaled."""

    def estimate(self, returns: Returns) -> Estimate:
        values = returns.values
        if values is None:
            raise ValueError("advantage gae needs the critic's values")
        credited = returns.share * returns.trial_rewards[returns.rollout] + returns.extra
        rewards = turn_rewards(credited, returns.sequence, returns.turns) + returns.kl_rewards
        columns = (rewards, values.double(), returns.sequence)
        if self.level == "turn":
            advantages, targets = self.by_turn(*columns, returns.turns)
        else:
            advantages, targets = self.by_token(*columns)
        if self.normalise == "rollout":
            weights = RolloutMean().weights(returns.sequence, returns.rollout)
            advantages = whiten(advantages, weights.double())
        return Estimate(advantages, targets)

    def by_token(self, rewards: Tensor, values: Tensor, sequence: Tensor) -> tuple[Tensor, Tensor]:
        """`(advantages, targets)`, both `[N]`, from columns `[N]`; `sequence` is ascending."""
        index, counts = torch.unique_consecutive(sequence, return_inverse=True, return_counts=True)[
            1:
        ]
        column = torch.arange(len(values)) - (counts.cumsum(0) - counts)[index]
        shape = (len(counts), int(counts.max()) + 1)
        value_S_L, reward_S_L = values.new_zeros(shape), values.new_zeros(shape)
        value_S_L[index, column], reward_S_L[index, column] = values, rewards
        lam_S = torch.full_like(value_S_L[:, 0], self.lam)
        if self.length_alpha is not None:
            lam_S = (1 - 1 / (self.length_alpha * counts.to(lam_S))).clamp(min=0)
        advantages = self._discounted(reward_S_L, value_S_L, lam_S)[index, column]
        if self.target_lam is None:
            return advantages, advantages + values
        lam_S = torch.full_like(lam_S, self.target_lam)
        return advantages, self._discounted(reward_S_L, value_S_L, lam_S)[index, column] + values

    def _discounted(self, reward_S_L: Tensor, value_S_L: Tensor, lam_S: Tensor) -> Tensor:
        """The advantages of each sequence, whose last column is beyond its end."""
        advantage_S_L = torch.zeros_like(value_S_L)
        for t in range(value_S_L.shape[1] - 2, -1, -1):
            delta = reward_S_L[:, t] + self.gamma * value_S_L[:, t + 1] - value_S_L[:, t]
            advantage_S_L[:, t] = delta + self.gamma * lam_S * advantage_S_L[:, t + 1]
        return advantage_S_L

    def by_turn(
        self, rewards: Tensor, values: Tensor, sequence: Tensor, turns: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same as `by_token` with a whole turn as one action. The turn's reward is the sum over
        its tokens, its value is the value of its first token, and all of its tokens get the turn's
        advantage and target.
        """
        pair = torch.stack([sequence, turns])
        _, index, counts = torch.unique_consecutive(
            pair, dim=1, return_inverse=True, return_counts=True
        )
        first = counts.cumsum(0) - counts
        summed = rewards.new_zeros(len(counts)).index_add(0, index, rewards)
        advantages, targets = self.by_token(summed, values[first], sequence[first])
        return advantages[index], targets[index]


class FunctionAdvantage(Advantage, FunctionPart):
    """A function of your own, which returns the advantage of each trained token, `[N]`.

    Which rollouts it compares is not known, so that a group of one is allowed, and a rollout and
    its branches count as compared."""

    compares_within_group: ClassVar[bool] = False
    compares_trees: ClassVar[bool] = True

    def __call__(self, returns: Returns) -> Tensor:
        return column_of(self.name, "advantage", self.called(returns), returns.share)

    def estimate(self, returns: Returns) -> Estimate:
        return Estimate(self(returns))


def turn_rewards(credited: Tensor, sequence: Tensor, turns: Tensor) -> Tensor:
    """`[N]`: rewards whose sum from a turn to the end of its sequence is the turn's return.

    The reward of a turn is on its last trained token, and other tokens have 0. If every turn's
    return is the rollout's reward, only the last token of each sequence has a reward. All arguments
    are `[N]`.
    """
    rewards = torch.zeros_like(credited)
    same_sequence = sequence[1:] == sequence[:-1]
    ends_turn = torch.ones_like(sequence, dtype=torch.bool)
    ends_turn[:-1] = ~same_sequence | (turns[1:] != turns[:-1])
    after = torch.zeros_like(credited)
    after[:-1] = torch.where(same_sequence, credited[1:], torch.zeros_like(credited[1:]))
    rewards[ends_turn] = (credited - after)[ends_turn]
    return rewards


def whiten(advantages: Tensor, weights: Tensor) -> Tensor:
    """The advantages, scaled to mean 0 and variance 1 under `weights` `[N]` that sum to 1 (an equal
    share for each rollout); exactly 0 if all advantages are equal up to rounding.
    """
    centred = advantages - (advantages * weights).sum()
    std = (centred.square() * weights).sum().sqrt()
    if std <= REWARD_ROUNDING * advantages.abs().max():
        return torch.zeros_like(advantages)
    return centred / std


def _choose_ratio(a: Tensor, b: Tensor, k: Tensor) -> Tensor:
    """`C(a, k) / C(b, k)` for `a <= b` and `k <= b`; 0 if `a < k`."""

    def log_choose(n: Tensor) -> Tensor:
        return torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)

    possible = a >= k
    ratio = torch.exp(log_choose(torch.where(possible, a, k)) - log_choose(b))
    return torch.where(possible, ratio, torch.zeros_like(ratio))


ADVANTAGES = Parts[Advantage](
    Advantage,
    (
        Grpo,
        DrGrpo,
        Rloo,
        ReinforcePp,
        ReinforcePpBaseline,
        LitePpo,
        Opo,
        Gpg,
        PassAtK,
        Tree,
        Accepted,
        NoAdvantage,
        Gae,
    ),
    FunctionAdvantage,
)
"""Registry of the estimators for `algorithm.advantage`."""
