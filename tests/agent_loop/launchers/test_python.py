"""The python launcher: a function in a process that can be killed, isolated from the next."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from agent_loop.errors import LaunchError, RewardError
from agent_loop.launchers.protocol import AgentEnd, AgentResult, Trial
from agent_loop.launchers.python import PythonLauncher, PythonSettings
from agent_loop.records import Task
from proxy.errors import ConfigurationError
from tests.agent_loop.conftest import MakeTrial
from tests.agent_loop.launchers.test_command import alive, log_of, until


def launcher(function: str, **settings: float) -> PythonLauncher:
    target = f"tests.agent_loop.functions:{function}"
    return PythonLauncher(PythonSettings(target=target, **settings))  # type: ignore[arg-type]


async def run(trial: Trial, function: str, **settings: float) -> AgentResult:
    started = launcher(function, **settings)
    try:
        return await started.run(trial)
    finally:
        await started.close()


async def test_function_gets_its_call_and_environment_and_returns_the_reward(
    make_trial: MakeTrial,
) -> None:
    trial = make_trial()
    result = await run(trial, "reads_its_environment")
    assert (result.end, result.reward) == (AgentEnd.EXITED, 0.5)
    assert log_of(trial) == "asked: do it\n"


async def test_async_function_returns_a_reward_with_parts(make_trial: MakeTrial) -> None:
    result = await run(make_trial(), "awaits")
    assert result.reward == 1.0
    assert result.reward_parts == {"reward": 1.0, "speed": 0.25}


async def test_exception_is_a_crash_with_its_traceback_in_the_log(make_trial: MakeTrial) -> None:
    trial = make_trial()
    result = await run(trial, "fails")
    assert (result.end, result.reward) == (AgentEnd.CRASHED, None)
    assert "KeyError: 'no such thing'" in log_of(trial)


async def test_nothing_that_one_trial_did_is_seen_by_the_next(tmp_path: Path) -> None:
    trials = launcher("leaves_state")
    for number in range(2):
        assert (await trials.run(_trial(tmp_path, number))).reward == 1.0
    await trials.close()


async def test_trials_draw_by_their_seed(tmp_path: Path) -> None:
    trials = launcher("draws")
    drawn = [
        (await trials.run(_trial(tmp_path, number, seed=seed))).reward
        for number, seed in enumerate([1, 2, 1])
    ]
    await trials.close()
    assert drawn[0] == drawn[2] != drawn[1]


async def test_hanging_function_is_ended_at_its_deadline_with_its_children(
    make_trial: MakeTrial,
) -> None:
    trial = make_trial(timeout_s=3.0)
    result = await run(trial, "hangs_with_a_child", grace_s=0.2)
    assert result.end is AgentEnd.TIMED_OUT
    assert not alive(trial.workspace / "child.pid")


async def test_cancelling_ends_the_function_and_its_children(make_trial: MakeTrial) -> None:
    trial = make_trial(timeout_s=600)
    running = asyncio.ensure_future(run(trial, "hangs_with_a_child", grace_s=0.2))
    await until((trial.workspace / "child.pid").exists)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not alive(trial.workspace / "child.pid")


async def test_nan_is_refused_as_a_reward(make_trial: MakeTrial) -> None:
    with pytest.raises(RewardError, match="nan"):
        await run(make_trial(), "returns_nan")


async def test_function_that_does_not_exist_is_our_failure_and_says_so(
    make_trial: MakeTrial,
) -> None:
    with pytest.raises(LaunchError, match="no attribute 'missing'"):
        await run(make_trial(), "missing")


def test_module_that_does_not_exist_is_told_before_anything_starts() -> None:
    with pytest.raises(ConfigurationError, match=r"no module 'no_such_package\.agent'"):
        PythonLauncher(PythonSettings(target="no_such_package.agent:run"))


def _trial(root: Path, number: int, seed: int = 0) -> Trial:
    directory = root / str(number)
    directory.mkdir()
    made = Trial(str(number), Task("t", {}), "http://x/v1", "k", "m", directory, 120.0)
    return dataclasses.replace(made, seed=seed)
