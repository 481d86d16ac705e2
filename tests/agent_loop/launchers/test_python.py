"""The python launcher: each call of the function has a process of its own, which can be killed."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path

import pytest

from agent_loop.errors import RewardError
from agent_loop.launchers.python import PythonConfig, PythonLauncher
from agent_loop.processes.host import PROCESS, Job, ProcessConfig, StartsEarly
from agent_loop.records import AgentEnd, AgentResult, Task, Trial
from proxy.errors import ConfigurationError
from tests.agent_loop.conftest import MakeTrial
from tests.agent_loop.launchers.test_command import alive, log_of, until


def launcher(function: str, process: ProcessConfig = PROCESS) -> PythonLauncher:
    return PythonLauncher(PythonConfig(target=f"tests.agent_loop.functions:{function}"), process)


async def run(trial: Trial, function: str, process: ProcessConfig = PROCESS) -> AgentResult:
    started = launcher(function, process)
    try:
        return await started.run(trial)
    finally:
        await started.close()


async def test_function_gets_its_call_and_environment_and_its_return_value_is_the_reward(
    make_trial: MakeTrial,
) -> None:
    trial = make_trial()
    result = await run(trial, "reads_its_environment")
    assert (result.end, result.reward) == (AgentEnd.EXITED, 0.5)
    assert log_of(trial) == "asked: do it\n"


async def test_process_that_is_started_early_runs_the_first_trial(make_trial: MakeTrial) -> None:
    started = launcher("reads_its_environment")
    assert isinstance(started, StartsEarly)
    started.start()
    server = started._host._server
    assert server is not None
    result = await started.run(make_trial())
    assert (result.reward, started._host._server) == (0.5, server)
    await started.close()
    await started.close()
    assert server.poll() is not None


async def test_async_function_returns_a_reward_with_parts(make_trial: MakeTrial) -> None:
    result = await run(make_trial(), "awaits")
    assert result.reward == 1.0
    assert result.reward_parts == {"reward": 1.0, "speed": 0.25}


async def test_exception_is_a_crash_with_its_traceback_in_the_log(make_trial: MakeTrial) -> None:
    trial = make_trial()
    result = await run(trial, "fails")
    assert (result.end, result.reward) == (AgentEnd.CRASHED, None)
    assert "KeyError: 'no such thing'" in log_of(trial)


async def test_exit_with_a_message_is_a_crash_with_the_message_in_the_log(
    make_trial: MakeTrial,
) -> None:
    trial = make_trial()
    result = await run(trial, "exits_with_a_message")
    assert (result.end, result.reward) == (AgentEnd.CRASHED, None)
    assert log_of(trial) == "no such agent\n"


@pytest.mark.parametrize("function", ["closes_its_streams", "replaces_its_streams"])
async def test_reward_of_a_function_without_its_streams_counts(
    make_trial: MakeTrial, function: str
) -> None:
    result = await run(make_trial(), function)
    assert (result.end, result.reward) == (AgentEnd.EXITED, 0.5)


async def test_function_that_fails_without_its_streams_is_a_crash(make_trial: MakeTrial) -> None:
    result = await run(make_trial(), "fails_without_streams")
    assert (result.end, result.reward) == (AgentEnd.CRASHED, None)


async def test_scalars_of_numpy_are_a_reward(make_trial: MakeTrial) -> None:
    result = await run(make_trial(), "returns_scalars")
    assert (result.end, result.reward) == (AgentEnd.EXITED, 0.5)
    assert result.reward_parts == {"reward": 0.5, "solved": 1.0, "steps": 3.0}


@pytest.mark.parametrize(
    ("function", "words"),
    [("returns_an_array", "size 1"), ("returns_an_object", "returned object, which is no number")],
)
async def test_what_is_no_number_is_a_crash_that_says_so(
    make_trial: MakeTrial, function: str, words: str
) -> None:
    trial = make_trial()
    assert (await run(trial, function)).end is AgentEnd.CRASHED
    assert words in log_of(trial)


async def test_trial_does_not_see_the_effects_of_earlier_trials(tmp_path: Path) -> None:
    trials = launcher("leaves_state")
    for number in range(2):
        assert (await trials.run(_trial(tmp_path, number))).reward == 1.0
    await trials.close()


async def test_random_numbers_depend_on_the_trials_seed(tmp_path: Path) -> None:
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
    result = await run(trial, "hangs_with_a_child", ProcessConfig(grace_s=0.2))
    assert result.end is AgentEnd.TIMED_OUT
    assert not alive(trial.workspace / "child.pid")


async def test_cancelling_ends_the_function_and_its_children(make_trial: MakeTrial) -> None:
    trial = make_trial(timeout_s=600)
    running = asyncio.ensure_future(run(trial, "hangs_with_a_child", ProcessConfig(grace_s=0.2)))
    await until((trial.workspace / "child.pid").exists)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not alive(trial.workspace / "child.pid")


async def test_nan_is_refused_as_a_reward(make_trial: MakeTrial) -> None:
    with pytest.raises(RewardError, match="nan"):
        await run(make_trial(), "returns_nan")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1", r"defines no run; write def run\(call: agent_loop\.launchers\.calls\.Agent"),
        ("def run():\n    pass", r"has the signature run\(\), and is called with one argument"),
        (
            "async def run(call, task):\n    pass",
            r"has the signature run\(call, task\), .* def run",
        ),
        ("def run(call, *, seed):\n    pass", r"run\(call, \*, seed\)"),
        ("def run(call:\n    pass", r"is not Python: "),
    ],
)
def test_function_with_another_signature_is_refused_before_anything_starts(
    tmp_path: Path, text: str, expected: str
) -> None:
    file = tmp_path / "wrong_agent.py"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=expected):
        PythonLauncher(PythonConfig(target=f"{file}:run"))


@pytest.mark.parametrize(
    "text",
    [
        "def run(call, *more, seed=0): pass",
        "def run(call=None): pass",
        "from agent_loop.errors import LaunchError as run",
        "run = print",
        "try:\n    import json\n    def run(a, b): pass\nfinally: pass",
    ],
)
async def test_function_that_may_have_the_signature_is_accepted(tmp_path: Path, text: str) -> None:
    file = tmp_path / "right_agent.py"
    file.write_text(text)
    await PythonLauncher(PythonConfig(target=f"{file}:run")).close()


def test_missing_module_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigurationError, match=r"no module 'no_such_package\.agent'"):
        PythonLauncher(PythonConfig(target="no_such_package.agent:run"))


async def test_function_in_a_file_can_import_the_modules_beside_it(
    make_trial: MakeTrial, tmp_path: Path
) -> None:
    (tmp_path / "neighbour.py").write_text("REWARD = 0.25")
    agent = tmp_path / "my_agent.py"
    agent.write_text("from neighbour import REWARD\ndef run(call): return REWARD")
    started = PythonLauncher(PythonConfig(target=f"{agent}:run"))
    result = await started.run(make_trial())
    await started.close()
    assert (result.end, result.reward) == (AgentEnd.EXITED, 0.25)


def test_job_names_its_working_directory_absolutely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = Job(argv=(), cwd=Path("runs/work"), env={}, log=Path("log"), timeout_s=1.0)
    with open(job.as_file(sandbox=None, descriptors=()), "rb") as file:
        assert json.load(file)["cwd"] == str(tmp_path / "runs/work")


def test_missing_file_is_refused_with_its_full_path() -> None:
    with pytest.raises(ConfigurationError, match=r"there is no file '/.*/examples/agnet\.py'"):
        PythonLauncher(PythonConfig(target="examples/agnet.py:run"))


def _trial(root: Path, number: int, seed: int = 0) -> Trial:
    directory = root / str(number)
    directory.mkdir()
    made = Trial(str(number), Task("t", {}), "http://x/v1", "k", "m", directory, 120.0)
    return dataclasses.replace(made, seed=seed)


async def test_passed_variables_reach_the_function_and_a_long_log_is_cut(
    make_trial: MakeTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REGION", "eu")
    trial = make_trial()
    process = ProcessConfig(pass_env=("REGION",), log_bytes=1024)
    started = launcher("prints_its_region", process)
    assert (await started.run(trial)).reward == 1.0
    await started.close()
    assert len(log_of(trial)) < 2048
