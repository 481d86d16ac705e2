"""The quickstart's agent as a function whose reward takes its time, as a test suite's does.

What was sampled waits meanwhile for its reward, and the trainer goes on: this is what makes tokens
old without work for the processor. benchmarks.algorithms puts `examples/quickstart` on its path.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import agent

if TYPE_CHECKING:
    from agent_loop.launchers.calls import AgentCall

GRADING_S = 10.0
"""Some two updates of an idle machine with two cores."""


def run(call: AgentCall) -> float:
    reward = agent.run(call)
    time.sleep(GRADING_S)
    return reward
