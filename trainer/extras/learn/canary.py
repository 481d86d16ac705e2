"""Whether a canary is better than the stable adapter, by a test that may be looked at any time.

A new session gets the canary with the probability `share`, a, and both adapters' probabilities of
its tokens, π_c and π_s, can be computed, whichever sampled them. So each judged session tells of
both. With y = 1 if it went well, else 0,

    X = w (y − b) / max(b, 1 − b),    w = min(a, 1 − a) (π_c − π_s) / (a π_c + (1 − a) π_s)

is within [−1, 1], and has a mean of at most 0 if sessions of the canary go well at most as often,
because w weighs the sessions that both together give: a balance heuristic (Veach and Guibas 1995).
b, of the sessions before, only makes the variance small. Then

    E = ∫₀¹ Π (1 + λ X) dλ

is a nonnegative supermartingale that begins at 1. It exceeds 1/α at any time with a probability of
at most α (Ville 1939): a test by betting (Waudby-Smith and Ramdas, arXiv 2010.09686) with the
off-policy weights of arXiv 2210.10768, and the mixture of Robbins (1970). The integral is a sum
over fixed values of λ, which is such a supermartingale, too.

Where the ratio of the probabilities is not known, or is far from 1 as in long sessions, w is ±1 by
the adapter that served the session: the comparison of the two shares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

Verdict = Literal["promote", "rollback", "undecided"]
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(64)
_LAMBDA = (_NODES + 1) / 2
MAX_LOG_RATIO = 50.0
"""Beyond it, `w` is ±1 in floating point."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A judged session. Example: Compared(well=True, by_canary=False, log_ratio=0.7)"""

    well: bool
    """Whether it went well."""
    by_canary: bool
    log_ratio: float | None = None
    """log π_c/π_s of its sampled tokens, in nats; None: only known is who sampled them."""

    def weight(self, share: float) -> float:
        """w, in [-1, 1]."""
        least = min(share, 1 - share)
        if self.log_ratio is None:
            return least / share if self.by_canary else -least / (1 - share)
        bounded = max(-MAX_LOG_RATIO, min(MAX_LOG_RATIO, self.log_ratio))
        return least * math.expm1(bounded) / (share * math.exp(bounded) + 1 - share)


@dataclass(frozen=True)
class Comparison:
    """Example: Comparison([Compared(True, True, 0.4)], share=0.5).verdict(0.05, max_sessions=80)"""

    sessions: Sequence[Compared]
    """In the order in which they were judged."""
    share: float
    """Share of the new sessions that the canary gets."""

    @property
    def better(self) -> float:
        """E: the evidence that the canary is better."""
        return float(self._evidence(1)[-1])

    @property
    def worse(self) -> float:
        """The evidence that it is worse."""
        return float(self._evidence(-1)[-1])

    @property
    def counts(self) -> dict[str, list[int]]:
        """Adapter → number of its sessions that went well, and of all its sessions."""
        return {
            name: [sum(each.well for each in own), len(own)]
            for name, own in (
                ("canary", [each for each in self.sessions if each.by_canary]),
                ("stable", [each for each in self.sessions if not each.by_canary]),
            )
        }

    def verdict(self, alpha: float, max_sessions: int) -> Verdict:
        """`promote`: with a probability of at most `alpha`, the canary is not better. `rollback`:
        with at most `alpha`, it is not worse; or it is not shown to be better after
        `max_sessions`."""
        both = zip(self._evidence(1), self._evidence(-1), strict=True)
        for number, (better, worse) in enumerate(both):  # whichever came first
            if better >= 1 / alpha:
                return "promote"
            if worse >= 1 / alpha or number >= max_sessions:
                return "rollback"
        return "undecided"

    def says_little(self, alpha: float, least: int) -> bool:
        """Whether `least` sessions have not even brought half of what decides, in logarithms."""
        return len(self.sessions) >= least and max(self.better, self.worse) < alpha**-0.5

    def _evidence(self, sign: int) -> npt.NDArray[np.float64]:
        """`[n + 1]`: the evidence before the first session, and after each."""
        factors = np.log1p(_LAMBDA * sign * self._increments[:, None])
        logs = np.concatenate([np.zeros((1, len(_LAMBDA))), np.cumsum(factors, axis=0)])
        found: npt.NDArray[np.float64] = np.exp(logs) @ (_WEIGHTS / 2)
        return found

    @cached_property
    def _increments(self) -> npt.NDArray[np.float64]:
        """`[n]`: X of each session. b is the mean of the earlier outcomes, each weighted by w²,
        with a half session of each kind before them."""
        found = np.zeros(len(self.sessions))
        seen, went_well = 1.0, 0.5
        for index, each in enumerate(self.sessions):
            weight, mean = each.weight(self.share), went_well / seen
            found[index] = weight * (each.well - mean) / max(mean, 1 - mean)
            seen += weight**2
            went_well += each.well * weight**2
        return found
