"""`agentic-proxy run` with unmodified agents: they reach the proxy without any other setting."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from tests.e2e.agents.test_agents import AGENTS, PROMPT, proxy
from tests.needs import needs
from tests.proxy.conftest import ADMIN_KEY, RunningProxy

__all__ = ["proxy"]
pytestmark = [
    pytest.mark.agents,
    needs(None if (AGENTS / ".ready").exists() else f"no {AGENTS}: make agents"),
]
COMMANDS = [
    ["claude", "-p", PROMPT, "--dangerously-skip-permissions"],
    ["mini", "-y", "--exit-immediately", "-t", PROMPT],
    pytest.param(
        [
            "codex",
            "exec",
            "--skip-git-repo-check",
            "--dangerously-bypass-approvals-and-sandbox",
            PROMPT,
        ],
        marks=pytest.mark.long,
    ),
    ["opencode", "run", PROMPT],
    ["qwen", "-y", PROMPT],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
async def test_agent_does_its_task_in_a_recorded_session(
    command: list[str], proxy: RunningProxy, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    environment = {
        **os.environ,
        "HOME": str(tmp_path),
        "PATH": f"{AGENTS}/bin:{os.environ['PATH']}",
        "AGENTIC_PROXY_ADMIN_KEY": ADMIN_KEY,
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "proxy", "run", "--url", proxy.url, "--session", "s"),
        *("--store", f"sqlite:///{tmp_path}/proxy.db", "--", *command),
        cwd=work,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    said = output.decode(errors="replace")[-3000:]
    assert process.returncode == 0, said
    assert (work / "out.txt").read_text() == "hi\n", said
    _, turns = await proxy.control.get_turns("s")
    assert len(turns) >= 3
    assert f"session s: {len(turns)} turns" in said
