"""Folders of finished trials are removed by age and by size, the oldest first."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from agent_loop.launchers.command import CommandConfig, CommandLauncher
from agent_loop.records import Task
from agent_loop.remote_agent_loop import RemoteAgentLoop
from agent_loop.rewards.reported import LauncherReward
from agent_loop.trial.config import TrialConfig
from agent_loop.trial.folders import FinishedTrials
from proxy.config import RetentionConfig
from proxy.records import SessionKind
from tests.proxy.conftest import RunningProxy

KIB = 1024


def trial(folder: Path, name: str, kib: int = 100) -> None:
    (folder / name / "work").mkdir(parents=True)
    (folder / name / "work" / "file").write_bytes(b"x" * kib * KIB)


@pytest.mark.parametrize("is_continued", [False, True])
def test_oldest_folders_are_removed_above_the_size(tmp_path: Path, is_continued: bool) -> None:
    keep = RetentionConfig(max_bytes=400 * KIB)
    finished = FinishedTrials(tmp_path, keep)
    for number in range(3):
        trial(tmp_path, f"t-{number}")
        os.utime(tmp_path / f"t-{number}", (number, number))
        finished.add(f"t-{number}")
    if is_continued:  # by another process, which finds the folders
        finished = FinishedTrials(tmp_path, keep)
    trial(tmp_path, "running", kib=5000)
    trial(tmp_path, "t-3")
    finished.add("t-3")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["running", "t-1", "t-2", "t-3"]


def test_folders_are_removed_after_completed_s(tmp_path: Path) -> None:
    now = 1000.0
    finished = FinishedTrials(tmp_path, RetentionConfig(completed_s=60), now=lambda: now)
    for number in range(3):
        trial(tmp_path, f"t-{number}")
        finished.add(f"t-{number}")
        now += 50
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t-1", "t-2"]


def test_links_of_an_agent_neither_count_nor_lead_out_of_the_folder(tmp_path: Path) -> None:
    outside, trials = tmp_path / "outside", tmp_path / "trials"
    trial(outside, "precious", kib=5000)
    finished = FinishedTrials(trials, RetentionConfig(max_bytes=400 * KIB))
    trial(trials, "t-0")
    (trials / "t-0" / "work" / "link").symlink_to(outside)
    finished.add("t-0")
    assert (trials / "t-0").exists()
    trial(trials, "t-1", kib=500)
    finished.add("t-1")
    assert not (trials / "t-0").exists()
    assert (outside / "precious" / "work" / "file").exists()


def test_without_limits_nothing_is_removed(tmp_path: Path) -> None:
    finished = FinishedTrials(tmp_path, RetentionConfig())
    trial(tmp_path, "t-0")
    finished.add("t-0")
    assert (tmp_path / "t-0").exists()


async def test_loop_removes_the_folders_of_its_finished_trials(
    proxy: RunningProxy, tmp_path: Path
) -> None:
    config = CommandConfig(argv=("head", "-c", "100000", "/dev/zero"))
    for keep, left in ((RetentionConfig(max_bytes=150 * KIB), 1), (None, 3)):
        folder = tmp_path / f"trials-{left}"
        loop = RemoteAgentLoop(
            proxy.control,
            CommandLauncher(config),
            LauncherReward(),
            folder,
            trial=TrialConfig(sandbox="off", max_retries=0),
            finished=None if keep is None else FinishedTrials(folder, keep),
        )
        for _ in range(3):
            await loop.run(Task("t", {}), kind=SessionKind.TRAIN)
        await loop.close()
        assert len(list(loop.trials_dir.iterdir())) == left


@pytest.mark.parametrize("keep_workspaces", [False, True])
async def test_folders_inside_each_other_a_thousand_times_are_removed(
    proxy: RunningProxy, tmp_path: Path, keep_workspaces: bool
) -> None:
    """Such as of an agent that copies a folder into itself."""
    nests = "import os\nfor _ in range(2500): os.mkdir('d'); os.chdir('d')"
    folder = tmp_path / "trials"
    loop = RemoteAgentLoop(
        proxy.control,
        CommandLauncher(CommandConfig(argv=(sys.executable, "-I", "-S", "-c", nests))),
        LauncherReward(),
        folder,
        trial=TrialConfig(sandbox="off", max_retries=0, keep_workspaces=keep_workspaces),
        finished=FinishedTrials(folder, RetentionConfig(max_bytes=1)),
    )
    rollout = await loop.run(Task("t", {}), kind=SessionKind.TRAIN)
    await loop.close()
    assert "never had an answer" in str(rollout.error)
    assert list(folder.iterdir()) == []
