"""Reads the reward from a function's return value or from a program's output.

Invariant: every value that trains is a number of at most REWARD_LIMIT in absolute value. *No
reward* is None, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from agent_loop.errors import RewardError
from agent_loop.records import Graded
from proxy.settings.section import Section

REWARD_LIMIT = 1e9
"""Largest absolute value of a reward, of a turn's return and of its share. Advantages and gradients
are float32, whose largest number is 3.4e38: a norm squares the gradient, which is up to about 1e7
times the reward (its scale, the size of a batch, the derivatives of the layers), so that a reward
of 1e12 may already end in a norm that is not finite."""


class RewardKey(Section):
    """The key of the sections whose part may report several numbers."""

    key: str = "reward"
    """Which entry is used for training if the reward is a dictionary of numbers: what a function
    returns, a service reports, a container's termination message or a `reward.json` holds."""


def graded(raw: Any, key: str, origin: str) -> Graded:
    """Reads a number, or a dictionary of numbers whose entry `key` trains. Errors name `origin`.

    Example: graded({"reward": True, "style": 0.5}, "reward", "reward.json") == Graded(1.0, {…})

    Raises:
        RewardError: not a number, not within REWARD_LIMIT, or `key` is missing.
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
    """Raises RewardError: not a finite number, or above REWARD_LIMIT."""
    if isinstance(raw, list | tuple):
        raise RewardError(
            f"{origin}: a list of {len(raw)} values; a reward is one number for the whole trial, "
            "and there are no rewards of single tokens. Post the rewards of single model calls to "
            "the session, each with its turn (remote_agent.posted_rewards)"
        )
    try:
        value = float(raw)
    except OverflowError:
        value = math.inf if raw > 0 else -math.inf
    except (TypeError, ValueError):
        raise RewardError(f"{origin}: {shown(raw)} is not a number") from None
    return within_limit(value, origin)


def within_limit(value: float, origin: str) -> float:
    """Raises RewardError: NaN, or above REWARD_LIMIT in absolute value."""
    if not abs(value) <= REWARD_LIMIT:  # also NaN
        raise RewardError(
            f"{origin}: {value:g} is not a finite number between -{REWARD_LIMIT:g} and "
            f"{REWARD_LIMIT:g}"
        )
    return value


def shown(raw: object) -> str:
    """The value for an error message, in at most 80 characters."""
    try:
        return f"{raw!r:.80}"
    except ValueError:
        return "an integer of thousands of digits"
