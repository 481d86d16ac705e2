"""A request to rank 0 that needs all ranks, because each of them holds a part of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.learning.policies import Learners


@dataclass(frozen=True, slots=True)
class ScoreText:
    """Computes the log-probabilities of a text under the current weights."""

    ids: Sequence[int]

    def on(self, learners: Learners) -> list[float]:
        return learners.only.score(self.ids)
