"""The scripted engine's model for real agents: it solves a short task with tools.

The model looks for a shell among the tools that the agent's prompt names, writes a file with it,
reads the file, and says that it is done. An agent whose format is plain text gets it in that form.
"""

from __future__ import annotations

import json
import re
from typing import Any

COMMANDS = ("echo hi > out.txt", "cat out.txt")
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""How the model reports to mini-swe-agent that the task is done."""
DONE = "I wrote hi to out.txt and read it back: the task is done now."
SHELLS: dict[str, Any] = {
    "Bash": lambda command: {"command": command, "description": "Runs the step"},
    "bash": lambda command: {"command": command, "description": "Runs the step"},
    "exec_command": lambda command: {"cmd": command},
    "shell": lambda command: {"command": ["bash", "-lc", command]},
    "shell_command": lambda command: {"command": command},
    "run_shell_command": lambda command: {
        "command": command,
        "is_background": False,
        "description": "Runs the step",
    },
    "terminal": lambda command: {"command": command, "security_risk": "LOW"},
    "run_command": lambda command: {"command": command},
}
FORCED = '<tool_call>\n{"name": "'
ENDS: dict[str, dict[str, str]] = {
    "submit": {},  # SWE-agent's; to be sent twice
    "finish": {"message": DONE},  # OpenHands'
    "final_answer": {"answer": DONE},  # smolagents'
}
"""The tools by which the model reports to an agent that the task is done."""
LISTING = "*file listing* format"
"""How aider asks for files."""
_TOOLS = re.compile(r"<tools>\n(.*?)\n</tools>", re.DOTALL)


def play(prompt: str) -> str:
    """The answer to a rendered prompt (ChatML, Qwen3's tool format)."""
    offered = _offered(prompt)
    shell = next((name for name in offered if name in SHELLS), None)
    if LISTING in prompt:
        word = "hi" if "I ran this command" in prompt else "ho"  # right when its test has failed
        return f"I write it.\n\nout.txt\n```\n{word}\n```"
    if shell is None:
        return DONE
    if prompt.endswith(FORCED):  # `tool_choice` is required: the call has been begun
        return play(prompt.removesuffix(FORCED)).partition(FORCED)[2]
    # smolagents puts results into user messages.
    done = max(prompt.count("<tool_response>\n"), prompt.count("\nObservation:\n"))
    if done < len(COMMANDS):
        return f"Step {done + 1}.\n" + _run(shell, COMMANDS[done], offered)
    end = next((name for name in offered if name in ENDS), None)
    if end is not None:
        return call(end, ENDS[end])
    return _run(shell, SUBMIT, offered) if SUBMIT in prompt else DONE


def _run(shell: str, command: str, offered: dict[str, Any]) -> str:
    """A call with the arguments that this shell takes; some take no description."""
    taken = offered[shell]["parameters"]["properties"]
    arguments = SHELLS[shell](command)
    return call(shell, {name: value for name, value in arguments.items() if name in taken})


def _offered(prompt: str) -> dict[str, Any]:
    """The functions that the prompt offers, by name."""
    tools = _TOOLS.search(prompt)
    offered = [json.loads(line) for line in tools[1].splitlines()] if tools else []
    functions = [tool.get("function", tool) for tool in offered]
    return {function["name"]: function for function in functions}


def call(tool: str, arguments: dict[str, Any]) -> str:
    call = {"name": tool, "arguments": arguments}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
