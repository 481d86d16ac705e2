"""The quickstart's agent as a function whose reward arrives late, like that of a test suite.

The trainer continues while sampled tokens wait for their reward, so the tokens become stale without
using CPU time. benchmarks.algorithms puts `examples/quickstart` on the import path.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import agent

if TYPE_CHECKING:
    from agent_loop.launchers.calls import AgentCall

GRADING_S = 10.0
"""About two updates on an idle machine with two cores."""


def run(call: AgentCall) -> float:
    reward = agent.run(call)
    time.sleep(GRADING_S)
    return reward
