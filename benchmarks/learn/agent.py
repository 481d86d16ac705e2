"""An agent that sends what mini-swe-agent sends, without its start of three seconds."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.learn.expert import begin
from benchmarks.learn.world import Job
from examples.mini_swe_agent.expert import SUBMIT, TOOLS
from proxy.client import SessionHandle

MAX_STEPS = 6
COMMAND_S = 20.0
_HISTORY = ("role", "content", "tool_calls")


async def run(http: aiohttp.ClientSession, session: SessionHandle, job: Job, folder: Path) -> int:
    """Does the job in the folder; returns the number of calls that were answered."""
    messages: list[Any] = begin(job)
    headers = {"Authorization": f"Bearer {session.api_key}"}
    for step in range(MAX_STEPS):
        body = {"model": "work", "messages": messages, "tools": TOOLS, "max_tokens": 96}
        url = f"{session.base_url}/chat/completions"
        async with http.post(url, json=body, headers=headers) as response:
            response.raise_for_status()
            message = (await response.json())["choices"][0]["message"]
        messages.append(
            {k: v for k, v in message.items() if k in ("role", "content", "tool_calls")}
        )
        for call in message.get("tool_calls") or ():
            line = command_of(call["function"]["arguments"])
            if line == SUBMIT:
                return step + 1
            said = await asyncio.to_thread(shell, line, folder)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})
        if not message.get("tool_calls"):
            return step + 1
    return MAX_STEPS


def shell(line: str, folder: Path) -> str:
    """What mini-swe-agent says of a command."""
    try:
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=folder,
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=COMMAND_S,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        return '{\n  "returncode": 124,\n  "output": ""\n}'
    printed = json.dumps(done.stdout + done.stderr)
    return f'{{\n  "returncode": {done.returncode},\n  "output": {printed}\n}}'


def command_of(arguments: str) -> str:
    """The shell command in the arguments of a call; empty: there is none."""
    try:
        return str(json.loads(arguments).get("command", ""))
    except (json.JSONDecodeError, AttributeError):
        return ""
