"""langgraph's ReAct agent over Chat Completions."""

import os
import subprocess
import warnings

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

warnings.simplefilter("ignore")
from langgraph.prebuilt import create_react_agent  # noqa: E402


@tool
def run_command(command: str) -> str:
    """Runs a shell command."""
    return subprocess.run(
        command, shell=True, capture_output=True, text=True, errors="replace"
    ).stdout


agent = create_react_agent(ChatOpenAI(model=os.environ["OPENAI_MODEL"]), [run_command])
agent.invoke({"messages": [("user", os.environ["TASK_PROMPT"])]})
