"""Whether a canary is better than the stable adapter, by a test that may be looked at any time.

The n-th judged session of the canary is paired with the n-th of the stable adapter. Pairs with
equal outcomes say nothing; of the others, W are won by the canary and L lost. If it is not better,
each of them is won with a probability of at most 1/2, and

    E = ∫₀¹ (1 + λ)^W (1 − λ)^L dλ

is a nonnegative supermartingale that begins at 1. It exceeds 1/α at any time with a probability of
at most α (Ville 1939): the mixture test of Robbins (1970), as in Johari et al., arXiv 1512.04922.
The integral is a sum over fixed values of λ, which is such a supermartingale, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

Verdict = Literal["promote", "rollback", "undecided"]
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(64)
_LAMBDA = (_NODES + 1) / 2


@lru_cache(maxsize=4096)
def evidence_against(won: int, lost: int) -> float:
    """E: the evidence against "wins are at most as probable as losses"."""
    logs = won * np.log1p(_LAMBDA) + lost * np.log1p(-_LAMBDA)
    return float((np.exp(logs) * _WEIGHTS / 2).sum())


@dataclass(frozen=True, slots=True)
class Comparison:
    """Example: Comparison(canary=[1, 1, 0], stable=[0, 1]).verdict(alpha=0.05, max_pairs=40)"""

    canary: Sequence[bool]
    """Whether each judged session went well, in the order in which they were judged."""
    stable: Sequence[bool]

    @property
    def pairs(self) -> int:
        return min(len(self.canary), len(self.stable))

    @property
    def won(self) -> int:
        return sum(ours and not theirs for ours, theirs in self._pairs)

    @property
    def lost(self) -> int:
        return sum(theirs and not ours for ours, theirs in self._pairs)

    @property
    def better(self) -> float:
        """The evidence that the canary is better."""
        return evidence_against(self.won, self.lost)

    @property
    def worse(self) -> float:
        """The evidence that it is worse."""
        return evidence_against(self.lost, self.won)

    def verdict(self, alpha: float, max_pairs: int) -> Verdict:
        """`promote`: with a probability of at most `alpha`, the canary is not better. `rollback`:
        with at most `alpha`, it is not worse; or it is not shown to be better after
        `max_pairs`."""
        won = lost = 0
        for pairs, (ours, theirs) in enumerate(self._pairs, 1):  # whichever came first
            won, lost = won + (ours and not theirs), lost + (theirs and not ours)
            if evidence_against(won, lost) >= 1 / alpha:
                return "promote"
            if evidence_against(lost, won) >= 1 / alpha or pairs >= max_pairs:
                return "rollback"
        return "undecided"

    @property
    def _pairs(self) -> list[tuple[bool, bool]]:
        return list(zip(self.canary, self.stable, strict=False))
