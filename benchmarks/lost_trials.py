"""The quickstart's grader, where the infrastructure ends some trials in training.

Its runs have `examples/quickstart` on the import path (`benchmarks.false_zeros`).
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import verify

if TYPE_CHECKING:
    from agent_loop.launchers.calls import GradeCall

SHARE = 0.15


def or_failure(call: GradeCall) -> float:
    if _is_ended(call):
        raise OSError("the sandbox is gone")
    return verify.grade(call)


def or_zero(call: GradeCall) -> float:
    return 0.0 if _is_ended(call) else verify.grade(call)


def _is_ended(call: GradeCall) -> bool:
    """Whether it is one of the trials in training that the infrastructure ends."""
    in_training = call.task["task_id"].startswith("train")
    return in_training and random.SystemRandom().random() < SHARE  # processes are forked
