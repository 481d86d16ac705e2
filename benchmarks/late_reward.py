"""The quickstart's grader with rewards that arrive late, like those of a test suite.

The trainer continues while sampled tokens wait for their reward, so the tokens become stale without
using CPU time. benchmarks.algorithms puts `examples/quickstart` on the import path.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import verify

if TYPE_CHECKING:
    from agent_loop.launchers.calls import GradeCall

GRADING_S = 10.0
"""About two updates on an idle machine with two cores."""


def grade(call: GradeCall) -> float:
    time.sleep(GRADING_S)
    return verify.grade(call)
