"""Metrics of the user's own: functions of a step's rollouts, or of an evaluation's."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from agent_loop.outside_parts import OwnFunction
from agent_loop.records import Rollout
from trainer.errors import TrainingError


class OwnMetrics(OwnFunction):
    """A function of your own, which returns metrics by their names."""

    kind = "metric"

    def __call__(self, rollouts: Sequence[Rollout]) -> Mapping[str, float]:
        values: Mapping[str, float] = self.called(rollouts)
        if not isinstance(values, Mapping):
            raise TrainingError(
                f"logging.metrics={self.target} returned a {type(values).__name__}; it must map "
                "names of metrics to numbers"
            )
        return {str(name): float(value) for name, value in values.items()}


def own_metrics(
    functions: Sequence[OwnMetrics], rollouts: Sequence[Rollout], taken: Collection[str]
) -> dict[str, float]:
    """The metrics of all functions.

    Raises:
        TrainingError: a name is in `taken`, the names of the run's own metrics.
    """
    found: dict[str, float] = {}
    for function in functions:
        values = function(rollouts)
        if both := sorted(values.keys() & (set(taken) | found.keys())):
            raise TrainingError(
                f"logging.metrics={function.target} returned {both}, which the run or another "
                "function also logs; choose other names"
            )
        found |= values
    return found
