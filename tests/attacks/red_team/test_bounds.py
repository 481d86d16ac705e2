"""An agent that takes more memory or disk than it may is ended, and its trial's error says which
limit it met. Behind the light wall, in processes and files of which each is within its limit.
Processes and shared memory are bounded where no limit is set, too."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from agent_loop.processes.host import Limits
from agent_loop.records import Rollout, RolloutStatus, Task
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
FILE_IN_MEMORY = """
import os, time
kept = os.memfd_create("kept")
for _ in range(300):
    os.write(kept, bytes(1 << 20))
time.sleep(600)
"""
DISK_IN_MEMORY = """
import ctypes, os, pathlib, time
libc = ctypes.CDLL(None)
user, group = os.getuid(), os.getgid()
assert libc.unshare(0x10000000 | 0x00020000) == 0
for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
    pathlib.Path(f"/proc/self/{name}").write_text(text)
assert libc.mount(b"mine", os.environ["HOME"].encode(), b"tmpfs", 0, None) == 0
with open(os.environ["HOME"] + "/kept", "wb") as file:
    for _ in range(300):
        file.write(bytes(1 << 20))
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
IN_MEMORY = (MEMORY, FILE_IN_MEMORY, DISK_IN_MEMORY)
OF_MEMORY = "at most 200 MiB are allowed (limits.memory_bytes)"
BOUNDS = """
import os, resource
of_user = resource.getrlimit(resource.RLIMIT_NPROC)[0]
of_namespace = int(open("/proc/sys/kernel/pid_max").read())
memory = os.statvfs("/dev/shm")
print(of_user, of_namespace, memory.f_blocks * memory.f_frsize)
"""


async def run_agent(
    code: str, limits: dict[str, Any], proxy: RunningProxy, folder: Path
) -> Rollout:
    (folder / "agent.py").write_text(code)
    config = RemoteAgentConfig.model_validate(
        {
            "command": {"argv": [sys.executable, "-I", "-S", str(folder / "agent.py")]},
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
        folder / "trials",
        trial=config,
    )
    try:
        return await loop.run(Task("take", {"prompt": "x"}), kind=SessionKind.TRAIN)
    finally:
        await loop.close()


@pytest.mark.parametrize(
    ("code", "limits", "said"),
    [
        *((code, {"memory_bytes": 200 << 20}, OF_MEMORY) for code in IN_MEMORY),
        (FILES, {"file_bytes": 25 << 20}, "at most 25 MiB are allowed (limits.file_bytes)"),
    ],
    ids=["memory", "file-in-memory", "disk-in-memory", "files"],
)
async def test_trial_names_the_limit_that_its_agent_met(
    code: str, limits: dict[str, Any], said: str, proxy: RunningProxy, tmp_path: Path
) -> None:
    rollout = await run_agent(code, limits, proxy, tmp_path)
    assert rollout.status is RolloutStatus.FAILED
    assert said in (rollout.error or "")


async def test_processes_and_shared_memory_are_bounded_by_default(
    proxy: RunningProxy, tmp_path: Path
) -> None:
    rollout = await run_agent(BOUNDS, {}, proxy, tmp_path)
    log = Path(rollout.logs or "", "agent.log").read_text()
    of_user, of_namespace, shm_bytes = map(int, log.split())
    limits = Limits()
    assert limits.processes is not None
    assert shm_bytes == limits.shm_bytes
    if wall.missing_processes() is None:
        bounds = {of_user, of_namespace - wall.RESERVED_PIDS}
        assert limits.processes in bounds
