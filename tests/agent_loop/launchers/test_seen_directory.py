"""Behind a wall each trial's directory is at the same path, for its agent and for its verifier."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from agent_loop.launchers.command import CommandConfig
from agent_loop.records import AgentEnd, AgentResult, FinishedTrial, Task, Trial
from agent_loop.rewards.verifier import VerifierConfig
from proxy import wall
from proxy.records import Session, SessionKind, SessionStatus
from proxy.wall import Wall
from tests.needs import skip_or_fail

AGENT = """
import json, os, sys
seen = {"cwd": os.getcwd(), "pwd": os.environ["PWD"], "argv": sys.argv[1:],
        "task": json.load(open(os.environ["TASK_FILE"])),
        "own": os.listdir(os.path.dirname(os.getcwd())),
        "trials": os.listdir(os.path.dirname(os.path.dirname(os.getcwd())))}
json.dump(seen, open("seen.json", "w"))
os.symlink(os.path.abspath("seen.json"), "link.json")
open(os.path.join(sys.argv[2], "mine"), "w").write("x")
"""
VERIFIER = "import json, sys; sys.exit(0 if json.load(open('link.json')) else 1)"


@pytest.fixture(autouse=True)
def walls() -> None:
    if (why := wall.missing()) is not None:
        skip_or_fail(why)


def a_trial(trials: Path, name: str, *, walled: bool = True) -> Trial:
    directory = trials / name
    directory.mkdir(parents=True)
    return Trial(
        trial_id=name,
        task=Task("t", {"prompt": "Go."}),
        base_url="http://127.0.0.1:1/v1",
        api_key="k",
        model="m",
        directory=directory,
        timeout_s=60,
        seed=0,
        wall=Wall(hide=(str(trials.absolute()),)) if walled else None,
    )


def finished(trial: Trial) -> FinishedTrial:
    session = Session(
        session_id=trial.trial_id,
        key_hash=b"",
        kind=SessionKind.TRAIN,
        status=SessionStatus.COMPLETED,
        created_at=0,
        expires_at=1,
    )
    return FinishedTrial(trial, AgentResult(AgentEnd.EXITED), session, ())


async def run(trial: Trial) -> dict[str, object]:
    argv = (sys.executable, "-c", AGENT, "{workspace}", "{directory}")
    launcher = CommandConfig(argv=argv).build()
    result = await launcher.run(trial)
    await launcher.close()
    log = (trial.directory / "agent.log").read_text()
    assert result.end is AgentEnd.EXITED, log
    assert (trial.agent_directory / "mine").read_text() == "x"
    seen: dict[str, object] = json.loads((trial.workspace / "seen.json").read_text())
    return seen


async def test_two_trials_see_the_same_paths_and_only_their_own_files(tmp_path: Path) -> None:
    trials = tmp_path / "trials"
    one, other = [await run(a_trial(trials, name)) for name in ("t-1-a", "t-2-b")]
    assert one == other
    assert one["cwd"] == one["pwd"] == str(trials.resolve() / ".trial" / "work")
    assert one["trials"] == [".trial"]
    assert sorted(one["own"]) == ["agent", "task.json", "work"]  # type: ignore[call-overload]


async def test_without_a_wall_the_path_is_the_trials_own(tmp_path: Path) -> None:
    seen = await run(a_trial(tmp_path / "trials", "t-1", walled=False))
    assert seen["cwd"] == str((tmp_path / "trials" / "t-1" / "work").resolve())


@pytest.fixture
def link(tmp_path: Path) -> Path:
    """A link to a folder, as clusters have on the way to disks and home folders."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    return tmp_path / "link"


async def test_runs_behind_a_link_are_where_they_are_named(link: Path) -> None:
    assert (await run(a_trial(link / "trials", "t-1")))["own"]


async def test_home_behind_a_link_is_where_it_is_named(
    link: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(link))
    launcher = CommandConfig(argv=("sh", "-c", "echo wrote > ~/file && cat ~/file")).build()
    trial = a_trial(tmp_path / "trials", "t-1")
    result = await launcher.run(trial)
    await launcher.close()
    assert result.end is AgentEnd.EXITED
    assert (trial.directory / "agent.log").read_text() == "wrote\n"


async def test_verifier_can_use_what_names_the_agents_path(tmp_path: Path) -> None:
    trials = tmp_path / "trials"
    verifier = VerifierConfig(argv=(sys.executable, "-c", VERIFIER)).build()
    for name in ("t-1", "t-2"):
        trial = a_trial(trials, name)
        await run(trial)
        link = (trial.workspace / "link.json").readlink()
        assert link == trials.resolve() / ".trial" / "work" / "seen.json"
        graded = await verifier.grade(finished(trial))
        assert graded.value == 1.0
    await verifier.close()
    assert sorted(path.name for path in trials.iterdir()) == ["t-1", "t-2"]
