"""An agent that takes more memory or disk than it may is ended, and its trial's error says which
limit it met. Behind the light wall, in processes and files of which each is within its limit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from agent_loop.records import RolloutStatus, Task
from agent_loop.remote_agent_config import RemoteAgentConfig
from agent_loop.remote_agent_loop import RemoteAgentLoop
from proxy import wall
from proxy.records import SessionKind
from tests.proxy.conftest import RunningProxy

pytestmark = pytest.mark.skipif(
    wall.missing() is not None, reason=f"this machine has no wall: {wall.missing()}"
)
MEMORY = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        os.setsid()
        kept = bytearray(os.urandom(40 << 20))
        time.sleep(600)
time.sleep(600)
"""
FILES = """
import os, time
for folder in (os.getcwd(), os.environ["HOME"], "/tmp"):
    for number in range(10):
        with open(f"{folder}/{number}", "wb") as file:
            file.write(os.urandom(1 << 20))
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("code", "limits", "said"),
    [
        (MEMORY, {"memory_bytes": 200 << 20}, "at most 200 MiB are allowed (limits.memory_bytes)"),
        (FILES, {"file_bytes": 25 << 20}, "at most 25 MiB are allowed (limits.file_bytes)"),
    ],
    ids=["memory", "files"],
)
async def test_trial_names_the_limit_that_its_agent_met(
    code: str, limits: dict[str, Any], said: str, proxy: RunningProxy, tmp_path: Path
) -> None:
    (tmp_path / "agent.py").write_text(code)
    config = RemoteAgentConfig.model_validate(
        {
            "command": {"argv": [sys.executable, "-I", "-S", str(tmp_path / "agent.py")]},
            "process": {"limits": limits},
            "sandbox": "light without ports, sockets, processes",
            "max_retries": 0,
            "timeout_s": 120,
        }
    )
    loop = RemoteAgentLoop(
        proxy.control,
        config.build_launcher(),
        config.build_rewards(),
        tmp_path / "trials",
        trial=config,
    )
    try:
        rollout = await loop.run(Task("take", {"prompt": "x"}), kind=SessionKind.TRAIN)
    finally:
        await loop.close()
    assert rollout.status is RolloutStatus.FAILED
    assert said in (rollout.error or "")
