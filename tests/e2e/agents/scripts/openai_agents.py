"""The openai-agents SDK, over Chat Completions or Responses."""

import asyncio
import os
import subprocess

from agents import (
    Agent,
    Runner,
    function_tool,
    set_default_openai_api,
    set_tracing_disabled,
)

set_tracing_disabled(True)
set_default_openai_api("chat_completions" if os.environ["DIALECT"] == "chat" else "responses")


@function_tool
def run_command(command: str) -> str:
    """Runs a shell command.

    Args:
        command: what to run
    """
    return subprocess.run(
        command, shell=True, capture_output=True, text=True, errors="replace"
    ).stdout


agent = Agent(name="worker", tools=[run_command], model=os.environ["OPENAI_MODEL"])


async def main() -> None:
    result = Runner.run_streamed(agent, os.environ["TASK_PROMPT"], max_turns=50)
    async for _ in result.stream_events():
        pass


asyncio.run(main())
