"""The argument that a Python function is called with, as an agent or as a grader.

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
    """A trial, as an agent gets it. The environment holds the same values (OPENAI_BASE_URL, …), so
    that an SDK's default client works.

    Example: client = openai.OpenAI(base_url=call.base_url, api_key=call.api_key)
    """

    task: Mapping[str, Any]
    prompt: str
    model: str
    base_url: str
    """URL of the session, with `/v1`, as OpenAI's SDK expects it."""
    api_key: str
    workspace: Path
    """The agent's working directory."""
    trial_id: str
    seed: int


@dataclass(frozen=True, slots=True)
class GradeCall:
    """A finished trial, as a grader gets it.

    Example: return float(call.answers[-1]["content"].strip() == call.task["answer"])
    """

    task: Mapping[str, Any]
    workspace: Path
    """The working directory as the agent left it; also the grader's working directory."""
    agent_log: Path
    agent_end: str
    """`exited`, `crashed` or `timed_out`."""
    answers: Sequence[Mapping[str, Any]]
    """The model's messages, in order, as Chat Completions has them, whatever the agent speaks:
    `role`, `content`, and, if there are any, `reasoning_content` and `tool_calls`."""
