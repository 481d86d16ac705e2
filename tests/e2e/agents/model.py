"""What the scripted engine plays when a real agent asks: a short task with tools.

The model looks for a shell among the tools that the agent's prompt names, writes a file with it,
reads the file, and says that it is done. An agent whose format is plain text gets it in that form.
"""

from __future__ import annotations

import json
import re
from typing import Any

COMMANDS = ("echo hi > out.txt", "cat out.txt")
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""How mini-swe-agent is told that its task is done."""
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
    "run_command": lambda command: {"command": command},
}
FORCED = '<tool_call>\n{"name": "'
_TOOLS = re.compile(r"<tools>\n(.*?)\n</tools>", re.DOTALL)


def play(prompt: str) -> str:
    """The answer to a rendered prompt (ChatML, Qwen3's tool format)."""
    offered = _offered(prompt)
    shell = next((name for name in offered if name in SHELLS), None)
    if shell is None:
        return DONE
    if prompt.endswith(FORCED):  # `tool_choice` is required: the call has been begun
        return play(prompt.removesuffix(FORCED)).partition(FORCED)[2]
    # smolagents puts results into user messages.
    done = max(prompt.count("<tool_response>\n"), prompt.count("\nObservation:\n"))
    if done < len(COMMANDS):
        return f"Step {done + 1}.\n" + call(shell, SHELLS[shell](COMMANDS[done]))
    if "final_answer" in offered:
        return call("final_answer", {"answer": DONE})
    return call(shell, SHELLS[shell](SUBMIT)) if SUBMIT in prompt else DONE


def _offered(prompt: str) -> list[str]:
    """Names of the tools that the prompt offers."""
    tools = _TOOLS.search(prompt)
    offered = [json.loads(line) for line in tools[1].splitlines()] if tools else []
    return [tool.get("function", tool)["name"] for tool in offered]


def call(tool: str, arguments: dict[str, Any]) -> str:
    call = {"name": tool, "arguments": arguments}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
