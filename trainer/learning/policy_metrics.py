"""The metrics of a step in a run that trains several policies.

Invariant: each metric of a policy is under `policies/NAME/`. Those by which the whole run is judged
(`_OF_THE_RUN`) are also under their own names, as in a run with one policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from trainer.algorithms.token_loss import Metrics
from trainer.batch import Batch

_OF_THE_RUN: Mapping[str, Callable[[Iterable[float]], float]] = {
    "actor/update_steps": sum,
    "actor/trained_tokens": sum,
    "advantage/min": min,
    "advantage/max": max,
    "memory/peak_gib": max,
    "mismatch/logp_abs_mean": max,
    "staleness/max": max,
    "sync/bytes": sum,
    "sync/paused_s": sum,
    "sync/probe_abs_mean": max,
    "sync/total_s": sum,
    "throughput/mfu": max,
}
"""Metric → how the values of several policies become the one of the run."""


def of_policies(metrics: Mapping[str, Metrics]) -> Metrics:
    """The metrics of all policies, by name of the policy; the only policy of a run has the name "",
    and its metrics are unchanged."""
    if metrics.keys() == {""}:
        return metrics[""]
    named = {
        f"policies/{name}/{metric}": value
        for name, own in metrics.items()
        for metric, value in own.items()
    }
    for metric, combined in _OF_THE_RUN.items():
        if values := [own[metric] for own in metrics.values() if metric in own]:
            named[metric] = float(combined(values))
    return named


def share_metrics(batch: Batch) -> Metrics:
    """What a policy has of the trials of a step: their number and their mean reward."""
    trained = batch.rollout_tokens > 0
    return {
        "rollout/trials": float(trained.sum()),
        "reward/mean": float(batch.rewards[trained].mean()),
    }
