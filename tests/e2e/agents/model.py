"""The scripted engine's model for real agents: it solves a short task with tools.

The model looks for a shell among the tools that the agent's prompt names, writes a file with it,
reads the file, and says that it is done. An agent whose format is plain text gets it in that form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

COMMANDS = ("echo hi > out.txt", "cat out.txt")
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""How the model reports to mini-swe-agent that the task is done."""
DONE = "I wrote hi to out.txt and read it back: the task is done now."
SHELLS: dict[str, Any] = {
    "Bash": lambda command: {"command": command, "description": "Runs the step"},
    "bash": lambda command: {"command": command, "description": "Runs the step"},
    # On a busy machine, a command takes longer than Codex and OpenHands wait by default (10 s).
    "exec_command": lambda command: {"cmd": command, "yield_time_ms": 30_000},
    "shell": lambda command: {"command": ["bash", "-lc", command]},
    "shell_command": lambda command: {"command": command},
    "run_shell_command": lambda command: {
        "command": command,
        "is_background": False,
        "description": "Runs the step",
    },
    "terminal": lambda command: {"command": command, "timeout": 120, "security_risk": "LOW"},
    "run_command": lambda command: {"command": command},
    "run_commands": lambda command: {"commands": [command]},
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


def play(prompt: str, commands: Sequence[str] = COMMANDS) -> str:
    """The answer to a rendered prompt (ChatML, Qwen3's tool format)."""
    offered = offered_tools(prompt)
    shell = next((name for name in offered if name in SHELLS), None)
    if LISTING in prompt:
        word = "hi" if "I ran this command" in prompt else "ho"  # right when its test has failed
        return f"I write it.\n\nout.txt\n```\n{word}\n```"
    if shell is None:
        return DONE
    if prompt.endswith(FORCED):  # `tool_choice` is required: the call has been begun
        return play(prompt.removesuffix(FORCED), commands).partition(FORCED)[2]
    # smolagents puts results into user messages.
    done = max(prompt.count("<tool_response>\n"), prompt.count("\nObservation:\n"))
    if done < len(commands):
        return f"Step {done + 1}.\n" + shell_call(shell, commands[done], offered)
    end = next((name for name in offered if name in ENDS), None)
    if end is not None:
        return call(end, ENDS[end])
    return shell_call(shell, SUBMIT, offered) if SUBMIT in prompt else DONE


MAX_TOKENS = 1500
"""Of an answer in the hard task: its last one is longer."""
CUT = "this answer is cut "
_NUMBERS = {"weight": ("0.1", "1.0", "1e-7"), "timeout": ("60.1", "60.0", "1e2")}
"""In the form in which the model writes them, by the name of the argument."""
_HARD_COMMANDS = ("echo hi > out.txt", "echo 'Ko\u0308ln 😀 数学'", "seq 1 1500")


def play_hard(prompt: str) -> str:
    """The hard task: two calls at once, a call with a long output, an answer that is cut, the end.

    The arguments have numbers that JavaScript writes in another way, emoji and combining
    characters.
    """
    offered = offered_tools(prompt)
    shell = next((name for name in offered if name.rpartition("-")[2] in SHELLS), None)
    results = prompt.count("<tool_response>\n")
    if shell is None or CUT in prompt or "Go on." in prompt.rpartition("<|im_start|>user")[2]:
        return DONE
    calls = [
        _with_number(shell_call(shell, command, offered), number, offered[shell])
        for number, command in enumerate(_HARD_COMMANDS)
    ]
    if results == 0:
        return f"I look. 🙂 e\u0301\n{calls[0]}\n{calls[1]}"
    return CUT * MAX_TOKENS if _HARD_COMMANDS[2] in prompt else calls[2]


def _with_number(text: str, number: int, tool: dict[str, Any]) -> str:
    """The call with one of `_NUMBERS`, if the tool takes one."""
    taken = tool["parameters"]["properties"]
    name = next((name for name in _NUMBERS if name in taken), None)
    return text if name is None else text.replace("}}", f', "{name}": {_NUMBERS[name][number]}}}}}')


def shell_call(shell: str, command: str, offered: dict[str, Any]) -> str:
    """A call with the arguments that this shell takes; some take no description."""
    taken = offered[shell]["parameters"]["properties"]
    arguments = SHELLS[shell.rpartition("-")[2]](command)
    if taken.get("command", {}).get("type") == "string":
        arguments["command"] = command
    return call(shell, {name: value for name, value in arguments.items() if name in taken})


def offered_tools(prompt: str) -> dict[str, Any]:
    """The functions that the prompt offers, by name."""
    tools = _TOOLS.search(prompt)
    offered = [json.loads(line) for line in tools[1].splitlines()] if tools else []
    functions = [tool.get("function", tool) for tool in offered]
    return {function["name"]: function for function in functions}


def call(tool: str, arguments: dict[str, Any]) -> str:
    call = {"name": tool, "arguments": arguments}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
