"""pydantic-ai over Chat Completions: it sends tool arguments back in a compact form."""

import os
import subprocess

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel

agent = Agent(OpenAIChatModel(os.environ["OPENAI_MODEL"]))


@agent.tool_plain
def run_command(command: str) -> str:
    """Runs a shell command."""
    return subprocess.run(
        command, shell=True, capture_output=True, text=True, errors="replace"
    ).stdout


agent.run_sync(os.environ["TASK_PROMPT"])
