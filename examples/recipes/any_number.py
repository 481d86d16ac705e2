"""A reward that has nothing to do with the task, so that rewards differ and an update is made."""

from __future__ import annotations

import json
import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agent_loop.launchers.calls import GradeCall


def grade(call: GradeCall) -> float:
    """A number from 0 to 1 that depends on what the model answered."""
    answers = json.dumps([dict(answer) for answer in call.answers], sort_keys=True, default=str)
    return zlib.crc32(answers.encode()) / 0xFFFFFFFF
