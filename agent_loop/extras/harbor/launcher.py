"""The `harbor` launcher: runs a trial as a Harbor trial, on a `harbor-server` or in this process.

Invariant: a trial is one Harbor run, even if its submission is repeated (the trial's id is the
idempotency key). When a trial is cancelled, its run and its sandbox are ended. The reward is the
verifier's entry `key`; a trial that Harbor could not set up, run or verify has failed and
has no reward.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from agent_loop.errors import LaunchError
from agent_loop.extras.harbor.servers import HarborServers
from agent_loop.extras.harbor.task_folders import Folders, resolve_task_dir
from agent_loop.launchers.protocol import LauncherConfig
from agent_loop.processes.host import PROCESS, ProcessConfig
from agent_loop.records import AgentEnd, AgentResult, Trial
from agent_loop.reward_values import RewardKey, graded
from harbor_sdk import (
    AgentRun,
    AgentRunClient,
    AgentRunError,
    AgentRunRequest,
    AgentSpec,
    EnvironmentSpec,
    RunStatus,
    VerifierSpec,
)
from harbor_sdk.models import AGENT_CRASHES
from proxy.errors import ConfigurationError

RUN_FILE = "harbor_run.json"
"""Name of the file in the trial's directory that holds Harbor's complete result."""

_log = logging.getLogger(__name__)


class HarborConfig(RewardKey, LauncherConfig):
    """Example: HarborConfig(agent_name="terminus-2", server_url="http://127.0.0.1:8090").build()"""

    agent_name: str | None = None
    """Name of one of Harbor's agents: `terminus-2`, `mini-swe-agent`, `claude-code`, `codex`, …"""
    agent_import_path: str | None = None
    """An agent class of your own instead: `module:Class`."""
    agent_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the agent's class."""
    agent_env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the agent."""
    environment_type: str | None = None
    """Harbor's name of the sandbox (`docker`, `modal`, …). Without it and without
    `environment_import_path`: the server's default, or the local environment."""
    environment_import_path: str | None = None
    """A sandbox class of your own instead: `module:Class`."""
    environment_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the sandbox's class."""
    environment_overrides: dict[str, Any] = Field(default_factory=dict)
    """Fields of Harbor's EnvironmentConfig, such as `override_cpus`."""
    verifier_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Fields of Harbor's VerifierConfig: `import_path`, `override_timeout_sec`, …"""
    dataset_dirs: Folders = ()
    """Folders that are searched for a task's folder by its `instance_id`."""
    task_path_template: str = ""
    """Path of the folder of a task that is not in a dataset folder; may contain `{instance_id}` and
    `{task_id}`."""
    upload_tasks: bool = True
    """Send the task's folder to the server; false: the server finds the same path in its `--tasks`
    folder."""
    server_url: str | tuple[str, ...] | None = None
    """URL of a harbor-server; its token, if it has one, is read from HARBOR_SERVER_TOKEN, or from
    the file that HARBOR_SERVER_TOKEN_FILE names. Or a list of servers with the same token: a trial
    goes to the one that has the fewest of this run's trials and answers."""
    server_trials: int | None = Field(None, ge=1)
    """Maximum number of this run's trials at each server at the same time; further trials wait in
    this process, for at most `server_timeout_s`. None: all are sent, and wait in the servers'
    queues."""
    server_timeout_s: float = Field(1800.0, gt=0)
    """Seconds after which a whole run (queue, set-up, agent and verifier) is cancelled."""
    use_local_trial: bool = False
    """Run Harbor in this process (Python 3.12 with the harbor package) instead of on a server."""

    @property
    def process_keys(self) -> frozenset[str]:
        return frozenset()

    def build(self, process: ProcessConfig = PROCESS) -> HarborLauncher:
        return HarborLauncher(self)

    @model_validator(mode="after")
    def _one_agent(self) -> Self:
        if (self.agent_name is None) == (self.agent_import_path is None):
            raise ValueError("set agent_name, or agent_import_path, and not both")
        return self


class HarborLauncher:
    """Runs each trial through Harbor."""

    def __init__(self, settings: HarborConfig) -> None:
        """Raises ConfigurationError: neither a server nor local Harbor is configured, or both."""
        self._settings = settings
        self._open: HarborServers | None = None
        given = {
            "server_url": settings.server_url,
            "use_local_trial": settings.use_local_trial,
        }
        if sum(map(bool, given.values())) != 1:
            found = ", ".join(f"{name}={value!r}" for name, value in given.items())
            raise ConfigurationError(f"{found}: give one of them, and only one")
        if settings.use_local_trial and find_spec("harbor") is None:
            raise ConfigurationError(
                "use_local_trial: this Python has no harbor package (it needs 3.12); start a "
                "harbor-server in another environment and set server_url"
            )

    @property
    def overhead_s(self) -> float:
        waits = 1 if self._settings.server_trials is None else 2
        return self._settings.server_timeout_s * waits

    async def run(self, trial: Trial) -> AgentResult:
        started = time.monotonic()
        task_dir = resolve_task_dir(
            trial.task, self._settings.dataset_dirs, self._settings.task_path_template
        )
        request = self._request(trial, task_dir)
        trial.workspace.mkdir(exist_ok=True)  # empty: the agent works in its sandbox
        try:
            if self._settings.use_local_trial:
                run = await self._run_here(request, trial, task_dir)
            else:
                run = await self._run_there(request, trial, task_dir)
        except AgentRunError as error:
            raise LaunchError(f"harbor: {error.message}") from error
        (trial.directory / RUN_FILE).write_text(run.model_dump_json(indent=1), encoding="utf-8")
        return self._result(run, time.monotonic() - started)

    async def close(self) -> None:
        if self._open is not None:
            await self._open.close()

    def _request(self, trial: Trial, task_dir: Path | None) -> AgentRunRequest:
        settings, data = self._settings, trial.task.data
        if task_dir is None and not data.get("task_name"):
            raise LaunchError(
                f"task {trial.task.task_id!r}: no Harbor task folder (looked in local_task_path, "
                f"{len(settings.dataset_dirs)} dataset_dirs, task_path_template) and no task_name"
            )
        uploaded = settings.upload_tasks or settings.use_local_trial
        return AgentRunRequest(
            task_id=trial.trial_id,
            job_id=trial.task.source,
            task_path=str(task_dir) if task_dir and not uploaded else None,
            task_name=None if task_dir else str(data["task_name"]),
            task_ref=None if task_dir else data.get("task_ref"),
            agent=AgentSpec(
                name=settings.agent_name,
                import_path=settings.agent_import_path,
                model_name=trial.model,
                max_timeout_sec=trial.timeout_s,
                kwargs=settings.agent_kwargs,
                env=settings.agent_env,
            ),
            environment=EnvironmentSpec(
                type=settings.environment_type,
                import_path=settings.environment_import_path,
                kwargs=settings.environment_kwargs,
            ),
            environment_overrides=settings.environment_overrides or None,
            verifier=VerifierSpec.model_validate(settings.verifier_kwargs),
            llm_proxy_url=trial.base_url,
            llm_api_key=trial.api_key,
        )

    async def _run_there(
        self, request: AgentRunRequest, trial: Trial, task_dir: Path | None
    ) -> AgentRun:
        servers = self._servers()
        for others in reversed(range(len(servers))):
            async with servers.place() as server:
                try:
                    return await self._run_at(server.client, request, trial, task_dir)
                except AgentRunError as error:
                    if error.code in ("unreachable", "queue_full"):
                        server.avoid()
                    # Only a refused run is submitted elsewhere: one whose answer was lost may run.
                    if error.code != "queue_full" or not others:
                        raise
        raise AssertionError("the last server's answer or error has left the loop")

    async def _run_at(
        self, client: AgentRunClient, request: AgentRunRequest, trial: Trial, task_dir: Path | None
    ) -> AgentRun:
        upload = task_dir if self._settings.upload_tasks else None
        submitting = asyncio.ensure_future(
            client.submit(request, task=upload, idempotency_key=trial.trial_id)
        )
        try:
            run_id = (await asyncio.shield(submitting)).run_id
            run = await client.wait(run_id, timeout_s=self._settings.server_timeout_s)
        except BaseException:
            await _end(client, submitting)
            raise
        await _keep_log(client, run_id, trial.directory / "agent.log")
        return run

    async def _run_here(
        self, request: AgentRunRequest, trial: Trial, task_dir: Path | None
    ) -> AgentRun:
        # Imported here, because Harbor cannot be installed on Python 3.11.
        from harbor_sdk.trial import run_trial

        async def on_phase(phase: str) -> None:
            pass

        try:
            return await asyncio.wait_for(
                run_trial(
                    request,
                    run_id=trial.trial_id,
                    task_dir=task_dir,
                    trials_dir=trial.directory / "harbor",
                    hidden=[trial.directory.parent],  # all trials of the run
                    on_phase=on_phase,
                ),
                self._settings.server_timeout_s,
            )
        except Exception as error:  # a boundary: Harbor, the task's and agent's code
            raise LaunchError(f"harbor: {type(error).__name__}: {error}") from error

    def _servers(self) -> HarborServers:
        if self._open is None:
            given = self._settings.server_url or ()
            self._open = HarborServers(
                (given,) if isinstance(given, str) else given,
                self._settings.server_trials,
                self._settings.server_timeout_s,
            )
        return self._open

    def _result(self, run: AgentRun, wall_s: float) -> AgentResult:
        if run.status not in (RunStatus.COMPLETED, RunStatus.TIMEOUT):
            raise LaunchError(f"harbor run {run.run_id} {run.status.value}: {run.error}")
        if run.status is RunStatus.TIMEOUT:
            end = AgentEnd.TIMED_OUT
        else:
            end = AgentEnd.CRASHED if run.error_type in AGENT_CRASHES else AgentEnd.EXITED
        reward = graded(run.rewards, self._settings.key, "harbor's verifier")
        return AgentResult(
            end,
            error=run.error,
            wall_s=run.times_s.get("agent_execution", wall_s),
            reward=reward.value,
            reward_parts=reward.parts,
            metrics=_metrics(run),
        )


async def _end(client: AgentRunClient, submitting: asyncio.Future[AgentRun]) -> None:
    """Ends the run, even if it is still being submitted. An error is logged and not raised, so that
    the caller reports the original error."""
    await asyncio.wait([submitting])
    if submitting.cancelled() or submitting.exception() is not None:
        return
    run_id = submitting.result().run_id
    try:
        await client.cancel(run_id)
    except AgentRunError as error:
        _log.warning("harbor run %s could not be cancelled: %s", run_id, error.message)


async def _keep_log(client: AgentRunClient, run_id: str, file: Path) -> None:
    """A run that ended before its trial began has no log. Without its log, its result counts."""
    try:
        file.write_text(await client.logs(run_id), encoding="utf-8")
    except AgentRunError as error:
        _log.warning("harbor run %s: the log could not be read: %s", run_id, error.message)


def _metrics(run: AgentRun) -> Mapping[str, float]:
    return {f"harbor_{name}_s": seconds for name, seconds in run.times_s.items()}
