"""The agent: LangChain's `create_agent` with its `SummarizationMiddleware`, both unmodified.

The module imports them from the virtual environment in which `make agents` installs them, once;
each trial is a fork of that process.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from benchmarks.compaction.vault import VAULT

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent_loop.launchers.calls import AgentCall

ROOT = Path(__file__).resolve().parents[2]
# Behind our own packages, which are compatible with LangChain's.
sys.path += map(str, (ROOT / ".agents/frameworks/lib").glob("python3*/site-packages"))

import httpx  # noqa: E402
from langchain.agents import create_agent  # noqa: E402
from langchain.agents.middleware import SummarizationMiddleware  # noqa: E402
from langchain_core.tools import tool  # noqa: E402
from langchain_openai import ChatOpenAI  # noqa: E402

PROMPTS = yaml.safe_load(Path(__file__).with_name("prompts.yaml").read_text(encoding="utf-8"))
CLIENT = httpx.Client(timeout=120)


def run(call: AgentCall) -> None:
    """The agent summarises its history before the last room."""
    _collect(call, [_summaries])


def run_without_limit(call: AgentCall) -> None:
    """The agent keeps its whole history."""
    _collect(call, [])


def _summaries(model: ChatOpenAI) -> SummarizationMiddleware:
    return SummarizationMiddleware(
        model,
        trigger=("messages", PROMPTS["trigger_messages"]),
        keep=("messages", PROMPTS["keep_messages"]),
        summary_prompt=PROMPTS["summary"],
    )


def _collect(
    call: AgentCall, middleware: list[Callable[[ChatOpenAI], SummarizationMiddleware]]
) -> None:
    """Lets the agent go through the rooms; what it says to the vault is written to `said`."""
    rooms = iter([*call.task["rooms"], VAULT])
    said = call.workspace / "said"

    @tool("next")
    def go_on() -> str:
        """Enter the next room."""
        return next(rooms, VAULT)

    @tool("open", return_direct=True)
    def open_vault(words: str) -> str:
        """Say the words to the vault."""
        said.write_text(words, encoding="utf-8")
        return "."

    model = ChatOpenAI(
        model=call.model, base_url=call.base_url, api_key=call.api_key, http_client=CLIENT
    )
    agent = create_agent(
        model,
        [go_on, open_vault],
        system_prompt=PROMPTS["system"],
        middleware=[make(model) for make in middleware],
    )
    agent.invoke({"messages": [("user", call.prompt)]}, {"recursion_limit": 60})
