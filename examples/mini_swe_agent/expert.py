"""The scripted expert of the warm-up, which makes mistakes on purpose.

Its transcripts contain exactly the messages that mini-swe-agent sends. Its commands are not
executed; their output is computed here from the files of `workspace/`.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import yaml

from examples.mini_swe_agent.shell_tasks import PROGRAMS, WORKSPACE, command, new_task
from examples.starter_model.transcripts import Message, Transcript

SYSTEM = "You are a helpful assistant that can interact with a computer."
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Execute a bash command",
            "parameters": {
                "type": "object",
                "properties": {
                    "command": {"type": "string", "description": "The bash command to execute"}
                },
                "required": ["command"],
            },
        },
    }
]
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"

# Probability of each mistake in the situations where it can be made.
_SUBMITS_AT_ONCE = 0.15
_ONLY_SHOWS = 0.35
_OTHER_PROGRAM = 0.25
_LOOKS_FIRST = 0.2


def transcript(rng: random.Random) -> Transcript:
    """One run of the agent on one task, possibly with mistakes."""
    task = new_task(rng)
    messages: list[Message] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": instance(task["prompt"])},
    ]
    kind, source, target = task["kind"], task["source"], task["target"]
    if rng.random() >= _SUBMITS_AT_ONCE:
        if rng.random() < _LOOKS_FIRST:
            _run(messages, f"cat {source}.txt", _show("rename", source))
        if rng.random() < _OTHER_PROGRAM:
            kind = rng.choice(list(PROGRAMS))
        line, printed = command(kind, source, target), ""
        if kind in PROGRAMS and rng.random() < _ONLY_SHOWS:
            line, printed = PROGRAMS[kind].format(source=source), _show(kind, source)
        _run(messages, line, printed)
    messages.append(_call(SUBMIT, len(messages)))
    return Transcript(messages, TOOLS)


def instance(prompt: str) -> str:
    """The user's message, as mini-swe-agent writes it."""
    config = yaml.safe_load(Path(__file__).with_name("prompts.yaml").read_text(encoding="utf-8"))
    template: str = config["agent"]["instance_template"]
    return template.replace("{{task}}", prompt).removesuffix("\n")


def observation(printed: str) -> str:
    """A command's result, as mini-swe-agent's own template writes it."""
    return f'{{\n  "returncode": 0,\n  "output": {json.dumps(printed)}\n}}'


def _show(kind: str, source: str) -> str:
    """The output of a kind's program for a file; for `rename`, which has none, the whole file."""
    lines = (WORKSPACE / f"{source}.txt").read_text(encoding="utf-8").split()
    shown = {
        "count": [str(len(lines))],
        "sum": [str(sum(map(int, lines)))],
        "first": lines[:1],
        "sort": sorted(lines, key=int),
    }.get(kind, lines)
    return "".join(f"{line}\n" for line in shown)


def _run(messages: list[Message], line: str, printed: str) -> None:
    messages.append(_call(line, len(messages)))
    call_id = messages[-1]["tool_calls"][0]["id"]
    messages.append({"role": "tool", "tool_call_id": call_id, "content": observation(printed)})


def _call(line: str, number: int) -> Message:
    function = {"name": "bash", "arguments": json.dumps({"command": line})}
    call = {"id": f"call_{number}", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}
