"""smolagents: it rewrites its calls into assistant text and their results into user messages."""

import os
import subprocess

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def run_command(command: str) -> str:
    """Runs a shell command.

    Args:
        command: what to run
    """
    return subprocess.run(
        command, shell=True, capture_output=True, text=True, errors="replace"
    ).stdout


model = OpenAIServerModel(
    os.environ["OPENAI_MODEL"],
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
)
ToolCallingAgent(tools=[run_command], model=model, max_steps=4).run(os.environ["TASK_PROMPT"])
