"""The returns of the tokens of a batch, and how returns are compared within a group.

Invariant: returns are compared by rollout, never by row, turn or token, so that a rollout that
forks weighs no more than one that does not; tokens that are too old to be trained count as the
others do. The difference from the baseline is exactly 0 if the
returns are equal up to the rounding of float32, and in a group of one rollout.

The return of a token is

    G = share · R + extra + penalty

`R` is the trial's reward of the token's rollout (0 if only its turns have rewards), `share` the
share of it that the token's turn gets (1, or `discount ** distance`), `extra` the reward posted for
that turn, and `penalty` the sum of the KL penalties from this token on. Each term has its own
baseline, computed from the same term of the other rollouts:

    G − b = share · (R − b(R)) + (extra − b(extra)) + (penalty − b(penalty))

- The reward is compared before the discount, and the difference is discounted, as in the process
  supervision of GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.3: rewards are normalised in
  their group, then summed over the steps that follow). For example, the baseline of a turn with a
  share of 0.9 is 0.9 times the baseline of the reward.
- The other terms belong to a turn or a token. They are compared with the turns or tokens of the
  other rollouts that are followed by the same number of turns or tokens, as in turn-level credit
  assignment (arXiv 2505.11821). A term without a counterpart in another rollout equals its own
  baseline.

Shapes: `R` rollouts, `N` tokens: the trained ones, then those that are too old for it. Statistics
are computed in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from agent_loop.records import REWARD_ROUNDING
from trainer.batch import Batch

Baseline = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`(values [K], group [K], tokens [K]) → [K]`, the baseline of each value; `tokens` are the numbers
of trained tokens of the rollouts. If a constant is added to all values of a group, the baseline
must increase by the same constant."""


@dataclass(frozen=True)
class Returns:
    """Example: two rollouts of one group, the second with two turns and a discount of 0.5:
    rewards = trial_rewards = [1 0]   group = [0 0]   tokens = [1 2]
    rollout = [0 1 1]   sequence = [0 1 1]   turns = [0 0 1]   share = [1 .5 1]
    extra = [0 0 0]   kl_rewards = [0 0 0]
    centred(group_mean) = [.5 -.25 -.5]
    """

    rewards: Tensor
    """`[R]` float64, rewards after shaping. If only turns have rewards, their sum."""
    trial_rewards: Tensor
    """`[R]` float64, rewards of the trials after shaping. 0 before it, if only turns have rewards:
    these are `extra`."""
    group: Tensor
    """`[R]` int64, index of the rollout's group."""
    tokens: Tensor
    """`[R]` float64, number of tokens of the rollout."""
    rollout: Tensor
    """`[N]` int64, index of the token's rollout."""
    sequence: Tensor
    """`[N]` int64, index of the token's sequence; ascending."""
    turns: Tensor
    """`[N]` int64, index of the token's turn within its session."""
    share: Tensor
    """`[N]` float64, the share of the trial's reward in the return."""
    extra: Tensor
    """`[N]` float64, reward posted for the token's turn, after shaping; exactly 0 if none was
    posted."""
    kl_rewards: Tensor
    """`[N]` float64, `-β KL` of each token; 0 if the divergence is not in the reward."""
    values: Tensor | None = None
    """`[N]` float32, the critic's values; None without a critic. With one, nothing is compared, and
    the tokens are the trained ones."""
    stale_tokens: int = 0
    """How many of the tokens, at the end, are too old to be trained. Their KL is not known."""
    prefixes: tuple[str, ...] = ()
    """`[R]`, as in `Batch`."""
    trial_ids: tuple[str, ...] = ()
    """`[R]`, as in `Batch`."""
    trained: Tensor | None = None
    """`[R]` bool: whether the rollout is trained, of which `algorithm.groups` leaves some out;
    None: all are."""

    @classmethod
    def of(
        cls,
        batch: Batch,
        rewards: Tensor,
        trial_rewards: Tensor,
        kl_rewards: Tensor | None = None,
        *,
        shaped_turns: Callable[[Tensor], Tensor] | None = None,
        trained: Tensor | None = None,
    ) -> Returns:
        """The returns of a batch with these shaped rewards, both `[R]`. `shaped_turns` shapes the
        rewards of single turns, `[N]` → `[N]`; `trained` is `[R]` bool, None: all are."""
        share, credited = batch.shares.double(), batch.returns.double()
        rollout, sequence, turns = batch.rollout, batch.sequence, batch.turns
        kl_rewards = torch.zeros_like(share) if kl_rewards is None else kl_rewards.double()
        stale = batch.stale if batch.values is None else None
        if stale is not None:
            row = torch.arange(len(stale.tokens)).repeat_interleave(stale.tokens)
            share = torch.cat([share, stale.shares.double()[row]])
            credited = torch.cat([credited, stale.returns.double()[row]])
            rollout = torch.cat([rollout, stale.rollout[row]])
            sequence = torch.cat([sequence, len(batch.sequences) + row])
            turns = torch.cat([turns, stale.turns[row]])
            kl_rewards = torch.cat([kl_rewards, kl_rewards.new_zeros(len(row))])
        reached = share * batch.trial_rewards.double()[rollout]
        rounding = REWARD_ROUNDING * torch.maximum(credited.abs(), reached.abs())
        extra = credited - reached
        extra = extra.masked_fill(extra.abs() <= rounding, 0.0)
        return cls(
            rewards=rewards.double(),
            trial_rewards=trial_rewards.double(),
            group=batch.group,
            tokens=torch.bincount(rollout, minlength=batch.num_rollouts).double(),
            rollout=rollout,
            sequence=sequence,
            turns=turns,
            share=share,
            extra=extra if shaped_turns is None else shaped_turns(extra),
            kl_rewards=kl_rewards,
            values=batch.values,
            stale_tokens=0 if stale is None else int(stale.tokens.sum()),
            prefixes=batch.prefixes,
            trial_ids=batch.trial_ids,
            trained=trained,
        )

    @property
    def trunk(self) -> Tensor:
        """`[R]` int64, the rollout of the batch from which each one branches; -1: none."""
        index = {trial: number for number, trial in enumerate(self.trial_ids)}
        named = [prefix.rpartition("@")[0] for prefix in self.prefixes]
        return torch.tensor([index.get(n, -1) for n in named] or [-1] * len(self.rewards))

    @property
    def first_turn(self) -> Tensor:
        """`[R]` int64, the turn after which each rollout branches; 0 for one without a prefix."""
        after = [int(prefix.rpartition("@")[2] or 0) for prefix in self.prefixes]
        return torch.tensor(after or [0] * len(self.rewards))

    @property
    def tree(self) -> Tensor:
        """`[R]` int64, the group in which the tree of each rollout begins: that of the rollout from
        which it branches, directly or by way of other branches, or its own."""
        trunk = self.trunk
        root = torch.arange(len(self.rewards))
        while (trunk[root] >= 0).any():
            root = torch.where(trunk[root] >= 0, trunk[root], root)
        return self.group[root]

    @property
    def whole_batch(self) -> Tensor:
        """`[R]`, group indices that put all rollouts into one group."""
        return torch.zeros_like(self.group)

    def centred(self, baseline: Baseline, by: Tensor | None = None) -> Tensor:
        """`[N]`: `G − b`, compared within `group`, or within the grouping `by` `[R]`."""
        by = self.group if by is None else by
        rewards = centre(self.trial_rewards, by, self.tokens, baseline)
        result = self.share * rewards[self.rollout]
        if self.extra.any():
            result = result + self._centred_units(
                self.extra, self.rollout, self.turns, by, baseline
            )
        if self.kl_rewards.any():
            count = len(self.kl_rewards) - self.stale_tokens
            to_go = reward_to_go(self.kl_rewards[:count], self.sequence[:count])
            units = self.rollout[:count], torch.arange(count)
            result[:count] += self._centred_units(to_go, *units, by, baseline)
        return result

    def turns_differ(self, by: Tensor) -> Tensor:
        """`[R]` bool: whether rewards of turns that `centred` compares within `by` `[R]` differ."""
        apart = self._centred_units(self.extra, self.rollout, self.turns, by, _no_baseline)
        largest = torch.zeros_like(self.rewards)
        largest = largest.scatter_reduce(0, self.rollout, apart, "amax")
        return group_max(largest, by) > 0

    def std(self, centred: Tensor, by: Tensor | None = None) -> Tensor:
        """`[N]`: `√(Σ_i m_i / (n − 1))` of the group's `n` rollouts, where `m_i` is the mean square
        of the centred returns of rollout i. Without discounts, posted turn rewards and KL it is the
        unbiased standard deviation of the rewards (as in TRL and verl). 0 in a group of one.
        """
        by = self.group if by is None else by
        squares = torch.zeros_like(self.rewards).index_add(0, self.rollout, centred.square())
        total = group_sum(squares / self.tokens.clamp(min=1), by)
        return (total / (group_size(by) - 1).clamp(min=1)).sqrt()[self.rollout]

    def normalised(
        self, centred: Tensor, deviations: Tensor, by: Tensor | None = None, *, eps: float
    ) -> Tensor:
        """`[N]`: `centred / (σ + ε · max |deviations|)`, where σ is the standard deviation of
        `deviations` within `by`; 0 if all deviations are 0. ε is relative, so that the advantages
        do not depend on the unit of the rewards.
        """
        by = self.group if by is None else by
        largest = torch.zeros_like(self.rewards)
        largest = largest.scatter_reduce(0, self.rollout, deviations.abs(), "amax")
        floor = eps * group_max(largest, by)[self.rollout]
        scale = self.std(deviations, by) + floor
        return torch.where(scale > 0, centred / scale, torch.zeros_like(centred))

    def _centred_units(
        self, column: Tensor, rollout: Tensor, unit: Tensor, by: Tensor, baseline: Baseline
    ) -> Tensor:
        """`column` minus its baseline, for tokens of these rollouts and units. A unit (a turn or a
        token) is compared with the units of the group that are followed by the same number of units
        in their rollout."""
        key, index = torch.unique(rollout * (int(unit.max()) + 1) + unit, return_inverse=True)
        owner = key // (int(unit.max()) + 1)
        ends = torch.bincount(owner, minlength=len(self.rewards)).cumsum(0)
        to_go = ends[owner] - 1 - torch.arange(len(owner))
        values = torch.zeros(len(owner), dtype=column.dtype).scatter(0, index, column)
        place = torch.unique(by[owner] * len(owner) + to_go, return_inverse=True)[1]
        return centre(values, place, self.tokens[owner], baseline)[index]


def _no_baseline(values: Tensor, _group: Tensor, _tokens: Tensor) -> Tensor:
    return torch.zeros_like(values)


def centre(values: Tensor, group: Tensor, tokens: Tensor, baseline: Baseline) -> Tensor:
    """`[K]`: `values − baseline`, exactly 0 in groups whose values are equal."""
    offset = values - group_min(values, group)
    offset = offset.masked_fill(are_equal(values, group), 0.0)
    return offset - baseline(offset, group, tokens)


def are_equal(values: Tensor, group: Tensor) -> Tensor:
    """`[K]` bool: whether the values of the element's group are equal up to rounding."""
    spread = group_max(values, group) - group_min(values, group)
    return spread <= REWARD_ROUNDING * group_max(values.abs(), group)


def reward_to_go(rewards: Tensor, sequence: Tensor) -> Tensor:
    """`[N]`: for each token the sum of `rewards` `[N]` from it to the end of its sequence."""
    after = rewards.flip(0).cumsum(0).flip(0)
    last = torch.ones_like(sequence, dtype=torch.bool)
    last[:-1] = sequence[1:] != sequence[:-1]
    beyond = torch.cat([after[1:], after.new_zeros(1)])[last]  # one per trained sequence
    index = torch.unique_consecutive(sequence, return_inverse=True)[1]
    return after - beyond[index]


def group_sum(values: Tensor, group: Tensor) -> Tensor:
    """`[K]`: for each element the sum of `values` `[K]` over its group."""
    sums = values.new_zeros(int(group.max()) + 1 if len(group) else 0)
    return sums.index_add(0, group, values)[group]


def group_size(group: Tensor) -> Tensor:
    """`[K]` float64: for each element the number of elements in its group."""
    return group_sum(torch.ones(len(group), dtype=torch.float64), group)


def group_max(values: Tensor, group: Tensor) -> Tensor:
    """`[K]`: for each element the largest value of its group."""
    size = int(group.max()) + 1 if len(group) else 0
    out = values.new_zeros(size)
    return out.scatter_reduce(0, group, values, "amax", include_self=False)[group]


def group_min(values: Tensor, group: Tensor) -> Tensor:
    """`[K]`: for each element the smallest value of its group."""
    return -group_max(-values, group)
