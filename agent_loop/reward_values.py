"""Reads the reward from a function's return value or from a program's output.

Invariant: every value is finite. *No reward* is None, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from agent_loop.errors import RewardError
from agent_loop.records import Graded


def graded(raw: Any, key: str, origin: str) -> Graded:
    """Reads a number, or a dictionary of numbers whose entry `key` trains. Errors name `origin`.

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
        raise RewardError(f"{origin}: has no {key!r}, the entry that trains; it has {list(parts)}")
    return Graded(parts[key], parts)


def number(raw: Any, origin: str) -> float:
    """Raises RewardError: not a finite number."""
    if isinstance(raw, list | tuple):
        raise RewardError(
            f"{origin}: a list of {len(raw)} values; a reward is one number for the whole trial, "
            "and there are no rewards of single tokens. Post the rewards of single model calls to "
            "the session, each with its turn (remote_agent.posted_rewards)"
        )
    try:
        value = float(raw)
    except (TypeError, ValueError):
        raise RewardError(f"{origin}: {str(raw)[:80]!r} is not a number") from None
    if not math.isfinite(value):
        raise RewardError(f"{origin}: the reward is {value}; it must be a finite number")
    return value
