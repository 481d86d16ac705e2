"""An agent that fills the disk on which the trials and their recordings are."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_loop.launchers.command import CommandConfig, CommandLauncher
from agent_loop.processes import supervisor
from agent_loop.processes.host import ProcessConfig
from agent_loop.records import RolloutStatus, Task
from agent_loop.remote_agent_loop import RemoteAgentLoop
from agent_loop.rewards.reported import LauncherReward
from agent_loop.trial.config import TrialConfig
from proxy.records import SessionKind, TurnStatus
from proxy.store.sqlite import SqliteStore
from tests.proxy.conftest import StartProxy

AGENT = (sys.executable, "-I", "-S", str(Path(__file__).parent / "filling_agent.py"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 32 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=32m", "small-disk", str(folder)]
    mounted = subprocess.run(words, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"needs root, to mount a file system: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)  # the proxy ends later


@pytest.mark.slow
@pytest.mark.parametrize("fills", ["a file", "a deleted file"])
@pytest.mark.parametrize("sandbox", ["off", "light"])
async def test_agent_that_fills_the_disk_ends_alone(
    start_proxy: StartProxy, small_disk: Path, tmp_path: Path, fills: str, sandbox: str
) -> None:
    store = SqliteStore(small_disk / "proxy.db")
    proxy = await start_proxy(store=store)
    full = tmp_path / "flags" / "full"
    full.parent.mkdir()
    loop = RemoteAgentLoop(
        proxy.control,
        CommandLauncher(CommandConfig(argv=AGENT), ProcessConfig(grace_s=0.2)),
        LauncherReward(),
        small_disk / "trials",
        trial=TrialConfig(max_retries=0, timeout_s=300, sandbox=sandbox, show=[str(full.parent)]),
    )
    data = {"prompt": "Hello.", "full": str(full)}
    tasks = [Task("filler", {**data, "fills": fills}, "t"), Task("neighbour", data, "t")]
    try:
        async with asyncio.timeout(120):
            filler, neighbour, _ = await asyncio.gather(
                *(loop.run(task, kind=SessionKind.TRAIN) for task in tasks),
                say_when_full(small_disk, full),
            )
    finally:
        await loop.close()
    assert filler.status is RolloutStatus.FAILED
    assert "disk" in str(filler.error)
    assert neighbour.error is None
    for rollout, answered in ((filler, 1), (neighbour, 3)):
        _, turns = await proxy.control.get_turns(rollout.trial_id)
        assert [turn.status for turn in turns] == [TurnStatus.DONE] * answered
    await store.close()


async def say_when_full(disk: Path, flag: Path) -> None:
    while os.statvfs(disk).f_bavail:  # noqa: ASYNC110 (a disk has no events)
        await asyncio.sleep(0.01)
    flag.touch()


@pytest.mark.parametrize(("left", "ends"), [(None, False), (2 << 20, False), (1 << 19, True)])
def test_agent_is_ended_if_it_wrote_more_than_a_scarce_disk_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int | None, ends: bool
) -> None:
    monkeypatch.setattr(supervisor, "_scarce_bytes", lambda _: left)
    (tmp_path / "written").write_bytes(b"x" * (1 << 20))
    bounds = supervisor.Bounds(None, None, [str(tmp_path)])
    bounds.check()
    assert bool(bounds.met) == ends
    assert (bounds.met_by == "disk") == ends


def test_deleted_files_count_while_they_are_open(tmp_path: Path) -> None:
    disk = tmp_path.stat().st_dev
    with (tmp_path / "deleted").open("wb") as file:
        file.write(b"x" * (1 << 20))
        file.flush()
        before = supervisor.deleted_bytes(disk, [os.getpid()])
        (tmp_path / "deleted").unlink()
        assert supervisor.deleted_bytes(disk, [os.getpid()]) - before >= 1 << 20
