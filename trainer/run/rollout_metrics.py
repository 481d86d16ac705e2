"""Pure functions that compute the metrics of a batch of groups and of its scores.

Invariant: a failed rollout counts in `rollout/failed` and is not part of any mean of rewards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from agent_loop.records import Group, Rollout, RolloutStatus
from proxy.records import Ids
from trainer.batch import Batch

Metrics = dict[str, float]

MAX_PARTS = 64
"""Number of reward parts, the first by name, that have a metric of their own in a step."""


def rollout_metrics(groups: Sequence[Group], *, success_at: float) -> Metrics:
    """Rewards, ends and sizes of the trials of a step; empty without trials."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        return {}
    usable = [rollout for rollout in rollouts if rollout.trainable]
    ends = Counter(rollout.status for rollout in rollouts)
    metrics = {
        "rollout/trials": float(len(rollouts)),
        "rollout/failed": ends[RolloutStatus.FAILED] / len(rollouts),
        "rollout/truncated": ends[RolloutStatus.TRUNCATED] / len(rollouts),
        "rollout/aborted": ends[RolloutStatus.ABORTED] / len(rollouts),
        "rollout/untrainable": 1 - len(usable) / len(rollouts),
        "rollout/with_prefix": _mean([float(bool(rollout.prefix)) for rollout in rollouts]),
        "rollout/uniform_groups": _mean([float(group.uniform) for group in groups]),
    }
    metrics |= _lost_trials(rollouts) | _shared_prompts(groups)
    if usable:
        # A rollout that begins with recorded turns says nothing about the policy from the start.
        from_start = [rollout for rollout in usable if not rollout.prefix] or usable
        metrics |= _rewards(from_start, success_at) | _sizes(usable)
    return metrics | _per_agent(rollouts, success_at)


def staleness_metrics(batch: Batch, version: int) -> Metrics:
    """Updates between sampling and training, per trained token, and their histogram."""
    ages = version - batch.versions
    metrics = {
        "staleness/mean": float(ages.float().mean()),
        "staleness/max": float(ages.max()),
    }
    for age, count in zip(*torch.unique(ages, return_counts=True), strict=True):
        metrics[f"staleness/tokens_at_{int(age)}"] = float(count)
    return metrics


def mismatch_metrics(batch: Batch, logprobs: torch.Tensor, version: int) -> Metrics:
    """The difference of trainer and engine: Δ = log p_trainer − log p_engine of each trained token.

    `logp_abs_mean` is the mean of |Δ| over tokens that the current weights sampled. On the same
    weights it is the numerical noise between two implementations; a larger value is a bug. `k3` is
    the mean of e^Δ − 1 − Δ (Schulman, "Approximating KL Divergence"), and `ess` = (Σ e^Δ)² /
    (N Σ e^2Δ) is the effective sample size as a share. Both include stale tokens.
    """
    delta = (logprobs - batch.logprobs).double()
    weights = delta.clamp(-20, 20).exp()
    metrics = {
        "mismatch/k3": float((weights - 1 - delta.clamp(-20, 20)).mean()),
        "mismatch/ess": float(weights.sum() ** 2 / (len(weights) * (weights**2).sum())),
        "mismatch/all_abs_mean": float(delta.abs().mean()),
    }
    fresh = delta[batch.versions == version]
    if len(fresh):
        metrics["mismatch/logp_abs_mean"] = float(fresh.abs().mean())
        metrics["mismatch/logp_abs_max"] = float(fresh.abs().max())
        metrics["mismatch/logp_mean"] = float(fresh.mean())
    return metrics


def _shared_prompts(groups: Sequence[Group]) -> Metrics:
    """How much of the first prompts of a group's trials is the same, as a share of their mean
    length, and the position at which they part. A share far below 1 costs prefill and training
    time: something (a folder, a date, an id) stands early in the prompt and differs by trial."""
    shares, parts = [], []
    for group in groups:
        prompts = [_first_prompt(rollout) for rollout in group.rollouts if rollout.segments]
        if len(prompts) < 2:
            continue
        size = min(map(len, prompts))
        same = np.all([prompt[:size] == prompts[0][:size] for prompt in prompts], axis=0)
        part = size if same.all() else int(same.argmin())
        shares.append(part / max(1.0, float(np.mean([len(prompt) for prompt in prompts]))))
        parts.append(float(part))
    if not shares:
        return {}
    return {"rollout/shared_prompt": _mean(shares), "rollout/prompts_part_at": _mean(parts)}


def _first_prompt(rollout: Rollout) -> Ids:
    segment = rollout.segments[0]
    return segment.ids[: int(segment.mask.argmax())] if segment.mask.any() else segment.ids


def _rewards(usable: Sequence[Rollout], success_at: float) -> Metrics:
    rewards = np.array([rollout.reward for rollout in usable], np.float64)
    metrics = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
        "rollout/success": float((rewards >= success_at).mean()),
    }
    sources = {rollout.task.source for rollout in usable}
    if len(sources) > 1:
        for source in sorted(sources):
            of_source = [r.reward or 0.0 for r in usable if r.task.source == source]
            metrics[f"reward/source/{source}"] = _mean(of_source)
    parts = sorted({part for rollout in usable for part in rollout.reward_parts})
    for part in parts[:MAX_PARTS]:
        values = [r.reward_parts[part] for r in usable if part in r.reward_parts]
        metrics[f"reward/part/{part}"] = _mean(values)
    return metrics


def _lost_trials(rollouts: Sequence[Rollout]) -> Metrics:
    """Sums over the rollouts, of which each counts the lost trials before its last one, and its
    tokens that are not trained because not all that top-k left is recorded."""
    lost = ("failed_attempts", "continuations", "diverged_continuations", "lost_tokens")
    names = (*lost, "tied_tokens")
    return {f"rollout/{name}": sum(r.metrics.get(name, 0.0) for r in rollouts) for name in names}


def _per_agent(rollouts: Sequence[Rollout], success_at: float) -> Metrics:
    """Metrics of each agent, in a run with several."""
    metrics: Metrics = {}
    for agent in sorted({rollout.task.agent for rollout in rollouts} - {""}):
        own = [rollout for rollout in rollouts if rollout.task.agent == agent]
        failed = [rollout.status is RolloutStatus.FAILED for rollout in own]
        metrics[f"agent/{agent}/trials"] = float(len(own))
        metrics[f"agent/{agent}/failed"] = _mean([float(each) for each in failed])
        if rewards := [r.reward for r in own if r.trainable and r.reward is not None]:
            metrics[f"agent/{agent}/reward"] = _mean(rewards)
            successes = [float(reward >= success_at) for reward in rewards]
            metrics[f"agent/{agent}/success"] = _mean(successes)
    return metrics


def _sizes(usable: Sequence[Rollout]) -> Metrics:
    forks: Counter[str] = Counter()
    for rollout in usable:
        forks.update(rollout.forks)
    metrics = {
        "rollout/turns": _mean([float(r.num_turns) for r in usable]),
        "rollout/sampled_tokens": float(sum(r.sampled_tokens for r in usable)),
        "rollout/tokens_per_trial": _mean([float(r.sampled_tokens) for r in usable]),
        "rollout/branches": _mean([float(_leaves(r)) for r in usable]),
        "rollout/seconds": _mean([r.times_s.get("total", 0.0) for r in usable]),
        "rollout/seconds_max": max(r.times_s.get("total", 0.0) for r in usable),
    }
    return metrics | {f"forks/{cause}": float(count) for cause, count in sorted(forks.items())}


def _leaves(rollout: Rollout) -> int:
    return len(rollout.segments) - len({s.parent for s in rollout.segments if s.parent >= 0})


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else float("nan")
