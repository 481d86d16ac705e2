"""What a reward source is to the loop: a finished trial in, numbers out, or a clear failure.

Invariant: a value that leaves a source is finite. *No reward* is None, never 0; a source that
could not judge raises `RewardError`, and the rollout is `failed`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from agent_loop.errors import RewardError
from agent_loop.launchers.protocol import AgentResult, Trial
from proxy.records import Session, Turn


@dataclass(frozen=True, slots=True)
class Graded:
    """Example: Graded(1.0, parts={"reward": 1.0, "style": 0.5})"""

    value: float | None
    """What trains; None: this source has no opinion."""
    parts: Mapping[str, float] = field(default_factory=dict)


NO_OPINION = Graded(None)


@dataclass(frozen=True, slots=True)
class Finished:
    """A trial whose agent has ended and whose session is completed."""

    trial: Trial
    agent: AgentResult
    session: Session
    turns: Sequence[Turn]


class RewardSource(Protocol):
    """Implementations: `verifier`, `grader`, `judge`, `reported`, `combined`."""

    async def grade(self, finished: Finished) -> Graded:
        """Called once per trial.

        Raises:
            RewardError: it could not be judged.
        """
        ...

    async def close(self) -> None: ...


def graded(raw: Any, key: str, origin: str) -> Graded:
    """Reads a number, or a dictionary of numbers of which `key` trains.

    Example: graded({"reward": True, "style": 0.5}, "reward", "reward.json") == Graded(1.0, {…})

    Raises:
        RewardError: not a number, not finite, or `key` is missing.
    """
    if raw is None:
        return Graded(None)
    if not isinstance(raw, Mapping):
        return Graded(number(raw, origin))
    parts = {str(name): number(value, f"{origin}: {name}") for name, value in raw.items()}
    if key not in parts:
        raise RewardError(f"{origin}: no {key!r} in it, which is what trains; it has {list(parts)}")
    return Graded(parts[key], parts)


def number(raw: Any, origin: str) -> float:
    """Raises RewardError: not a finite number."""
    try:
        value = float(raw)
    except (TypeError, ValueError):
        raise RewardError(f"{origin}: {str(raw)[:80]!r} is not a number") from None
    if not math.isfinite(value):
        raise RewardError(f"{origin}: the reward is {value}; it must be a finite number")
    return value
