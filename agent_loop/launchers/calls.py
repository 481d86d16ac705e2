"""What a Python function is called with, as an agent or as a grader: one argument.

def agent(call: AgentCall) -> float | dict[str, float] | None
async def grade(call: GradeCall) -> float | dict[str, float] | None
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class AgentCall:
    """The environment holds the same (OPENAI_BASE_URL, …), so an SDK's default client works.

    Example: client = openai.OpenAI(base_url=call.base_url, api_key=call.api_key)
    """

    task: Mapping[str, Any]
    prompt: str
    model: str
    base_url: str
    """For OpenAI's SDK: with `/v1`."""
    api_key: str
    workspace: Path
    """Also the working directory."""
    trial_id: str
    seed: int


@dataclass(frozen=True, slots=True)
class GradeCall:
    """Example: return float(call.answers[-1]["content"].strip() == call.task["answer"])"""

    task: Mapping[str, Any]
    workspace: Path
    """The agent's working directory, as it left it; also the grader's."""
    agent_log: Path
    agent_end: str
    """`exited`, `crashed` or `timed_out`."""
    answers: Sequence[Mapping[str, Any]]
    """The model's messages, in order, as the agent was sent them."""
