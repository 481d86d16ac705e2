"""The harbor launcher against a server whose trials are scripted (real ones: tests/e2e)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from pydantic import ValidationError

from agent_loop.errors import LaunchError, RewardError
from agent_loop.extras.harbor.launcher import RUN_FILE, HarborConfig, HarborLauncher
from agent_loop.records import AgentEnd, AgentResult, Trial
from agent_loop.rewards.grader import Grader, GraderConfig
from harbor_sdk import AgentRun, RunStatus
from proxy.errors import ConfigurationError
from tests.agent_loop.conftest import MakeTrial
from tests.agent_loop.recorded import finished
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
        given = {"agent_name": "terminus-2", "server_url": url, **settings}
        launcher = HarborLauncher(HarborConfig.model_validate(given))
        try:
            return await launcher.run(trial)
        finally:
            await launcher.close()


async def test_harbor_run_gets_the_trials_session_agent_and_time(
    tmp_path: Path, trial: Trial
) -> None:
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


async def test_grader_of_a_harbor_trial_runs_in_an_empty_folder(
    tmp_path: Path, trial: Trial
) -> None:
    agent = await launch(tmp_path, trial, ScriptedTrials(rewards={"reward": 0.0}))
    function = tmp_path / "files_here.py"
    function.write_text("import os\ndef grade(call): return 1.0 + len(os.listdir())\n")
    grader = Grader(GraderConfig(target=f"{function}:grade"))
    try:
        assert (await grader.grade(finished(trial, agent=agent))).value == 1.0
    finally:
        await grader.close()


async def test_reward_is_the_entry_of_key_and_never_a_sum(tmp_path: Path, trial: Trial) -> None:
    trials = ScriptedTrials(rewards={"correct": 1.0, "style": 1.0})
    result = await launch(tmp_path, trial, trials, key="style")
    assert result.reward == 1.0
    with pytest.raises(RewardError, match="no 'reward'"):
        await launch(tmp_path / "again", trial, trials)


@pytest.mark.parametrize(
    ("outcome", "end"),
    [
        ({"status": "timeout", "error_type": "AgentTimeoutError"}, AgentEnd.TIMED_OUT),
        ({"error_type": "NonZeroAgentExitCodeError", "error": "exit 2"}, AgentEnd.CRASHED),
        ({"error_type": "OutputTokenExceededError"}, AgentEnd.CRASHED),
    ],
)
async def test_verified_timeout_or_crash_keeps_its_reward(
    tmp_path: Path, trial: Trial, outcome: dict[str, object], end: AgentEnd
) -> None:
    result = await launch(tmp_path, trial, ScriptedTrials(**outcome))
    assert (result.end, result.reward) == (end, 1.0)


async def test_run_without_a_verifier_has_no_reward(tmp_path: Path, trial: Trial) -> None:
    assert (await launch(tmp_path, trial, ScriptedTrials(rewards=None))).reward is None


async def test_sandbox_failure_is_a_launch_error(tmp_path: Path, trial: Trial) -> None:
    trials = ScriptedTrials(status="failed", rewards=None, error="DockerError: no daemon")
    with pytest.raises(LaunchError, match="failed: DockerError: no daemon"):
        await launch(tmp_path, trial, trials)


async def test_failure_before_the_trial_has_a_log_is_reported_with_its_reason(
    tmp_path: Path, trial: Trial
) -> None:
    trials = ScriptedTrials(status="failed", rewards=None, error="ValueError: no such agent")
    with pytest.raises(LaunchError, match="failed: ValueError: no such agent"):
        await launch(tmp_path, trial, trials, agent_name="has no log")


async def test_run_whose_log_cannot_be_read_keeps_its_reward(tmp_path: Path, trial: Trial) -> None:
    assert (await launch(tmp_path, trial, ScriptedTrials(), agent_name="has no log")).reward == 1.0


async def test_cancelled_trial_ends_its_run(tmp_path: Path, trial: Trial) -> None:
    trials = ScriptedTrials()
    async with serving(tmp_path, trials) as url:
        launcher = HarborLauncher(HarborConfig(agent_name="waits", server_url=url))
        running = asyncio.create_task(launcher.run(trial))
        await trials.began.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert trials.ended_by_cancel == trials.started
        assert len(trials.started) == 1
        await launcher.close()


async def test_run_is_ended_after_harbor_server_timeout(tmp_path: Path, trial: Trial) -> None:
    trials = ScriptedTrials()
    with pytest.raises(LaunchError, match=r"has not ended after 0\.3 s"):
        await launch(tmp_path, trial, trials, agent_name="waits", server_timeout_s=0.3)
    assert trials.ended_by_cancel == trials.started


async def test_task_without_a_folder_or_name_is_refused_with_its_id(
    tmp_path: Path, make_trial: MakeTrial
) -> None:
    with pytest.raises(LaunchError, match="'task': no Harbor task folder"):
        await launch(tmp_path, make_trial(), ScriptedTrials())


@pytest.mark.parametrize("settings", [{}, {"use_local_trial": True, "server_url": "u"}])
def test_configuring_neither_or_both_of_server_and_local_harbor_is_refused(
    settings: dict[str, object],
) -> None:
    with pytest.raises(ConfigurationError, match="give one of them"):
        HarborLauncher(HarborConfig.model_validate({"agent_name": "oracle", **settings}))


@pytest.mark.parametrize("settings", [{}, {"agent_name": "codex", "agent_import_path": "m:Mine"}])
def test_section_without_an_agent_or_with_two_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="agent_name, or agent_import_path"):
        HarborConfig.model_validate(settings)


def test_local_trial_without_the_harbor_package_is_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigurationError, match="in another environment"):
        HarborLauncher(HarborConfig(agent_name="oracle", use_local_trial=True))


async def test_environment_agent_and_verifier_settings_reach_the_server(
    tmp_path: Path, trial: Trial
) -> None:
    trials = ScriptedTrials()
    await launch(
        tmp_path,
        trial,
        trials,
        agent_env={"MODE": "fast"},
        environment_type="docker",
        environment_kwargs={"region": "eu"},
        environment_overrides={"override_cpus": 2},
        verifier_kwargs={"override_timeout_sec": 9},
    )
    (request,) = trials.requests
    assert request.agent.env == {"MODE": "fast"}
    assert (request.environment.type, request.environment.kwargs) == ("docker", {"region": "eu"})
    assert request.environment_overrides == {"override_cpus": 2}
    assert request.verifier.override_timeout_sec == 9


async def test_environment_of_ones_own_is_named_by_its_import_path(
    tmp_path: Path, trial: Trial
) -> None:
    trials = ScriptedTrials()
    await launch(tmp_path, trial, trials, environment_import_path="my.sandbox:Sandbox")
    assert trials.requests[0].environment.import_path == "my.sandbox:Sandbox"


async def test_task_without_a_path_is_found_by_the_template_and_uploaded(
    tmp_path: Path, make_trial: MakeTrial
) -> None:
    write_task(tmp_path / "more", "x-task")
    trials = ScriptedTrials()
    template = f"{tmp_path}/more/x-{{task_id}}"
    result = await launch(tmp_path, make_trial(), trials, task_path_template=template)
    assert result.reward == 1.0
    assert trials.requests[0].task_path is None


async def test_without_upload_the_server_is_given_the_path_of_the_task(
    tmp_path: Path, trial: Trial
) -> None:
    trials = ScriptedTrials()
    settings = HarborConfig(agent_name="terminus-2", upload_tasks=False)
    async with serving(tmp_path, trials, task_roots=[tmp_path / "tasks"]) as url:
        launcher = HarborLauncher(settings.model_copy(update={"server_url": url}))
        await launcher.run(trial)
        await launcher.close()
    assert trials.requests[0].task_path == trial.task.data["local_task_path"]
