"""The harbor launcher against a server whose trials are scripted (real ones: tests/e2e)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agent_loop.errors import LaunchError, RewardError
from agent_loop.launchers.harbor import RUN_FILE, HarborLauncher, HarborSettings
from agent_loop.launchers.protocol import AgentEnd, AgentResult, Trial
from harbor_sdk import AgentRun, RunStatus
from proxy.errors import ConfigurationError
from tests.agent_loop.conftest import MakeTrial
from tests.harbor_sdk.harbor_tasks import write_task
from tests.harbor_sdk.scripted_server import ScriptedTrials, serving


@pytest.fixture
def trial(make_trial: MakeTrial, tmp_path: Path) -> Trial:
    task = write_task(tmp_path / "tasks", "one")
    return make_trial(timeout_s=33.0, local_task_path=str(task))


async def launch(
    tmp_path: Path, trial: Trial, trials: ScriptedTrials, **settings: object
) -> AgentResult:
    async with serving(tmp_path, trials) as url:
        given = {"agent_name": "terminus-2", "harbor_server_url": url, **settings}
        launcher = HarborLauncher(HarborSettings.model_validate(given))
        try:
            return await launcher.run(trial)
        finally:
            await launcher.close()


async def test_the_run_has_the_trials_session_agent_and_time(tmp_path: Path, trial: Trial) -> None:
    trials = ScriptedTrials(times_s={"agent_execution": 2.5}, rewards={"reward": 0.5, "style": 1})
    result = await launch(tmp_path, trial, trials, agent_kwargs={"max_turns": 3})
    (request,) = trials.requests
    assert (request.llm_proxy_url, request.llm_api_key) == (trial.base_url, trial.api_key)
    assert request.agent.name == "terminus-2"
    assert request.agent.kwargs == {"max_turns": 3}
    assert request.agent.max_timeout_sec == 33.0
    assert result.end is AgentEnd.EXITED
    assert (result.reward, result.reward_parts) == (0.5, {"reward": 0.5, "style": 1.0})
    assert result.wall_s == 2.5
    assert (trial.directory / "agent.log").read_text() == "the log"
    record = AgentRun.model_validate_json((trial.directory / RUN_FILE).read_text())
    assert record.status is RunStatus.COMPLETED


async def test_the_reward_is_the_key_and_never_the_sum(tmp_path: Path, trial: Trial) -> None:
    trials = ScriptedTrials(rewards={"correct": 1.0, "style": 1.0})
    result = await launch(tmp_path, trial, trials, reward_key="style")
    assert result.reward == 1.0
    with pytest.raises(RewardError, match="no 'reward'"):
        await launch(tmp_path / "again", trial, trials)


@pytest.mark.parametrize(
    ("outcome", "end"),
    [
        ({"status": "timeout", "error_type": "AgentTimeoutError"}, AgentEnd.TIMED_OUT),
        ({"error_type": "NonZeroAgentExitCodeError", "error": "exit 2"}, AgentEnd.CRASHED),
    ],
)
async def test_a_verified_time_out_or_crash_keeps_its_reward(
    tmp_path: Path, trial: Trial, outcome: dict[str, object], end: AgentEnd
) -> None:
    result = await launch(tmp_path, trial, ScriptedTrials(**outcome))
    assert (result.end, result.reward) == (end, 1.0)


async def test_no_verifier_is_no_reward(tmp_path: Path, trial: Trial) -> None:
    assert (await launch(tmp_path, trial, ScriptedTrials(rewards=None))).reward is None


async def test_a_failure_of_the_sandbox_is_no_result(tmp_path: Path, trial: Trial) -> None:
    trials = ScriptedTrials(status="failed", rewards=None, error="DockerError: no daemon")
    with pytest.raises(LaunchError, match="failed: DockerError: no daemon"):
        await launch(tmp_path, trial, trials)


async def test_a_cancelled_trial_ends_its_run(tmp_path: Path, trial: Trial) -> None:
    trials = ScriptedTrials()
    async with serving(tmp_path, trials) as url:
        launcher = HarborLauncher(HarborSettings(agent_name="waits", harbor_server_url=url))
        running = asyncio.create_task(launcher.run(trial))
        await trials.began.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert trials.ended_by_cancel == trials.started
        assert len(trials.started) == 1
        await launcher.close()


async def test_past_the_servers_time_the_run_is_ended(tmp_path: Path, trial: Trial) -> None:
    trials = ScriptedTrials()
    with pytest.raises(LaunchError, match=r"not final after 0\.3 s"):
        await launch(tmp_path, trial, trials, agent_name="waits", harbor_server_timeout=0.3)
    assert trials.ended_by_cancel == trials.started


async def test_a_task_without_a_folder_or_name_is_named(
    tmp_path: Path, make_trial: MakeTrial
) -> None:
    with pytest.raises(LaunchError, match="'task': no Harbor task folder"):
        await launch(tmp_path, make_trial(), ScriptedTrials())


@pytest.mark.parametrize("settings", [{}, {"use_local_trial": True, "harbor_server_url": "u"}])
def test_neither_or_both_of_server_and_local_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match="give one of them"):
        HarborLauncher(HarborSettings.model_validate(settings))


def test_a_local_trial_without_harbor_says_what_to_do() -> None:
    with pytest.raises(ConfigurationError, match="make harbor"):
        HarborLauncher(HarborSettings(use_local_trial=True))
