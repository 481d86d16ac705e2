"""The points at which one replica stopped sampling an answer and another call continued it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Cause(Enum):
    """Why a replica did not end an answer."""

    LOST = "lost"
    """The replica failed, or its connection broke."""
    UPDATED = "updated"
    """The call was cut because the policy has a new version, which samples the rest."""
    CUT = "cut"
    """The replica ended the answer early and reported it, as after an abort."""
    UNUSABLE = "unusable"
    """Its answer was invalid. The replica is not called again for this answer."""


@dataclass(frozen=True, slots=True)
class Seam:
    """The point in an answer from which another engine call samples it.

    Example: Seam(at_token=12, from_engine="gpu-0", to_engine="gpu-1", cause=Cause.LOST)
    """

    at_token: int
    from_engine: str
    to_engine: str
    cause: Cause
