"""The agents of the simulated users: mini-swe-agent, one that sends what it sends, without its
start of three seconds, and Claude Code.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.learn.expert import CLAUDE_PROMPT, PROMPTS, begin
from benchmarks.learn.model import CLAUDE_MODEL, MODEL
from benchmarks.learn.world import Job
from examples.mini_swe_agent.expert import SUBMIT, TOOLS
from proxy.client import SessionHandle

MINI = Path(".agents/python/bin/mini").absolute()
MINI_SETTINGS = {
    "MSWEA_CONFIGURED": "true",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_SILENT_STARTUP": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}
CLAUDE = Path(".agents/bin/claude").absolute()
CLAUDE_SETTINGS = {
    "IS_SANDBOX": "1",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
}
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


async def mini(http: aiohttp.ClientSession, session: SessionHandle, job: Job, folder: Path) -> int:
    """Does the job with the mini-swe-agent of `make agents`; returns the number of its calls."""
    output = folder.with_suffix(".json")
    process = await asyncio.create_subprocess_exec(
        *(str(MINI), "--yolo", "--exit-immediately", "--config=mini.yaml", f"--config={PROMPTS}"),
        *("--model=openai/work", f"--task={job.prompt}", f"--output={output}"),
        cwd=folder,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        env={
            **MINI_SETTINGS,
            "PATH": os.environ["PATH"],
            "HOME": str(folder.parent),
            "MSWEA_GLOBAL_CONFIG_DIR": str(folder.with_suffix(".mini")),
            "OPENAI_BASE_URL": session.base_url,
            "OPENAI_API_KEY": session.api_key,
        },
    )
    await process.wait()
    messages = json.loads(output.read_text(encoding="utf-8"))["messages"]
    return sum(message["role"] == "assistant" for message in messages)


async def claude_code(
    http: aiohttp.ClientSession, session: SessionHandle, job: Job, folder: Path
) -> int:
    """Does the job with the Claude Code of `make agents`; returns the number of its turns."""
    process = await asyncio.create_subprocess_exec(
        *(str(CLAUDE), "-p", job.prompt, "--bare", "--dangerously-skip-permissions"),
        *("--model=work", "--tools=Bash", f"--system-prompt={CLAUDE_PROMPT}"),
        *(f"--max-turns={MAX_STEPS}", "--output-format=json"),
        cwd=folder,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={
            **CLAUDE_SETTINGS,
            "PATH": os.environ["PATH"],
            "HOME": str(folder.parent),
            "CLAUDE_CONFIG_DIR": str(folder.with_suffix(".claude")),
            "ANTHROPIC_BASE_URL": session.anthropic_base_url,
            "ANTHROPIC_API_KEY": session.api_key,
        },
    )
    printed, _ = await process.communicate()
    return int(json.loads(printed)["num_turns"])


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


Work = Callable[[aiohttp.ClientSession, SessionHandle, Job, Path], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class Agent:
    """Example: Agent(mini, MODEL, evaluates=run)"""

    works: Work
    """Does a job in a folder; returns the number of its calls."""
    model: Path
    evaluates: Work
    """Does the jobs of an evaluation."""


AGENTS = {
    "like-mini": Agent(run, MODEL, evaluates=run),
    "mini-swe-agent": Agent(mini, MODEL, evaluates=run),
    "claude-code": Agent(claude_code, CLAUDE_MODEL, evaluates=claude_code),
}
