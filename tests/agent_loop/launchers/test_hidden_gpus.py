"""Agents, graders and verifiers do not see the GPUs of the run, unless their section says so."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from agent_loop.launchers.command import CommandConfig, CommandLauncher
from agent_loop.launchers.python import PythonConfig, PythonLauncher
from agent_loop.processes.environment import inherited_environment
from agent_loop.processes.host import ProcessConfig
from agent_loop.records import AgentEnd
from proxy import wall
from proxy.wall import Wall
from tests.agent_loop.conftest import MakeTrial

LOOK = """
import os
for path in os.environ["DEVICES"].split(":"):
    try:
        found = os.listdir(path) if os.path.isdir(path) else open(path).read()
    except OSError:
        found = "nothing"
    print(os.path.basename(path), found or "nothing")
print(repr(os.environ.get("CUDA_VISIBLE_DEVICES")))
"""
HIDDEN = {"nvidia0": "nothing", "dri": "nothing"}
SHOWN = {"nvidia0": "memory", "dri": "['renderD128']"}


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What takes the place of a driver's files."""
    (tmp_path / "nvidia0").write_text("memory")
    (tmp_path / "dri").mkdir()
    (tmp_path / "dri" / "renderD128").touch()
    patterns = (f"{tmp_path}/nvidia*", f"{tmp_path}/dri")
    monkeypatch.setattr(wall, "GPU_DEVICES", patterns)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    return f"{tmp_path}/nvidia0:{tmp_path}/dri"


@pytest.mark.skipif(wall.missing() is not None, reason=str(wall.missing()))
@pytest.mark.parametrize(
    ("settings", "variable", "found"),
    [
        ({}, "''", HIDDEN),
        ({"env": {"CUDA_VISIBLE_DEVICES": "1"}}, "'1'", SHOWN),
        ({"process": {"pass_env": ("CUDA_VISIBLE_DEVICES",)}}, "'0,1'", SHOWN),
    ],
)
async def test_agent_sees_gpus_only_if_its_section_says_so(
    make_trial: MakeTrial,
    devices: str,
    settings: dict[str, object],
    variable: str,
    found: dict[str, str],
) -> None:
    trial = replace(make_trial(), wall=Wall(hide=()))
    given = {"env": {}, **settings}
    given["env"] = {**given["env"], "DEVICES": devices}  # type: ignore[dict-item]
    process = ProcessConfig.model_validate(given.pop("process", {}))
    section = {"argv": (sys.executable, "-I", "-S", "-c", LOOK), **given}
    launcher = CommandLauncher(CommandConfig.model_validate(section), process)
    result = await launcher.run(trial)
    await launcher.close()
    assert result.end is AgentEnd.EXITED
    lines = (trial.directory / "agent.log").read_text().splitlines()
    assert lines == [*(" ".join(pair) for pair in found.items()), variable]


def agent(call: object) -> None:
    """The agent of the next test."""
    exec(LOOK, {})


@pytest.mark.skipif(wall.missing() is not None, reason=str(wall.missing()))
async def test_agent_that_is_a_function_sees_no_gpus(make_trial: MakeTrial, devices: str) -> None:
    trial = replace(make_trial(), wall=Wall(hide=()))
    config = PythonConfig(target=f"{__name__}:agent", env={"DEVICES": devices})
    launcher = PythonLauncher(config)
    await launcher.run(trial)
    await launcher.close()
    lines = (trial.directory / "agent.log").read_text().splitlines()
    assert lines[-3:] == ["nvidia0 nothing", "dri nothing", "''"]


def test_variable_that_is_passed_but_not_set_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "CUDA_VISIBLE_DEVICES" not in inherited_environment(["CUDA_VISIBLE_DEVICES"])
    assert inherited_environment()["CUDA_VISIBLE_DEVICES"] == ""  # graders' and verifiers', too


def test_devices_of_this_machine_are_found_by_their_names() -> None:
    assert set(wall.gpu_devices()) <= {f"/dev/{name}" for name in os.listdir("/dev")}
