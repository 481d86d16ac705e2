"""Starts an agent as a process: its environment variables, its working directory and its limits.

The `command` and the `python` launcher start their agents here. Invariant: an agent gets the key of
its own session and no other key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from agent_loop.launchers.workspace import make_workspace
from agent_loop.processes.environment import expand, inherited_environment
from agent_loop.processes.host import Ended, Job, Limits, ProcessHost
from agent_loop.records import NO_REWARD, AgentEnd, AgentResult, Graded, Trial

PROMPT_BYTES = 128_000
"""Maximum size of TASK_PROMPT, because Linux allows 131,072 bytes per environment string; a longer
prompt is in TASK_FILE only."""


class AgentProcessSettings(Protocol):
    """What the sections `command` and `python` have in common."""

    @property
    def env(self) -> Mapping[str, str]: ...
    @property
    def pass_env(self) -> Sequence[str]: ...
    @property
    def template(self) -> str | None: ...
    @property
    def grace_s(self) -> float: ...
    @property
    def log_bytes(self) -> int: ...
    @property
    def limits(self) -> Limits: ...


async def run_agent(
    host: ProcessHost,
    trial: Trial,
    settings: AgentProcessSettings,
    *,
    argv: Sequence[str] = (),
    call: Mapping[str, Any] | None = None,
    visible: Sequence[Path] = (),
) -> Ended:
    """Runs the agent in a new working directory, to its end or its deadline. The agent is the
    program `argv`, whose placeholders are replaced, or the function call `call`. `visible`: files
    that it can write besides the trial's own.

    Raises:
        LaunchError: the working directory cannot be made, or the agent cannot be started.
    """
    await make_workspace(trial, settings.template)
    job = Job(
        argv=[expand(part, trial) for part in argv],
        call=call,
        cwd=trial.workspace,
        env=agent_environment(trial, settings.env, settings.pass_env),
        log=trial.directory / "agent.log",
        timeout_s=trial.timeout_s,
        grace_s=settings.grace_s,
        log_bytes=settings.log_bytes,
        limits=settings.limits,
        wall=trial.wall,
        visible=(*trial.visible, *visible),
    )
    return await host.run(job)


def agent_environment(
    trial: Trial, extra: Mapping[str, str], pass_env: Sequence[str] = ()
) -> dict[str, str]:
    """The inherited variables and those named in `pass_env`, then the trial's, then `extra` with
    its placeholders replaced; later values replace earlier ones."""
    env = inherited_environment(pass_env)
    root = trial.base_url.removesuffix("/v1")
    env |= {
        "OPENAI_BASE_URL": trial.base_url,
        "OPENAI_API_BASE": trial.base_url,
        "OPENAI_API_KEY": trial.api_key,
        "ANTHROPIC_BASE_URL": root,
        "ANTHROPIC_API_KEY": trial.api_key,
        "AGENT_MODEL": trial.model,
        "OPENAI_MODEL": trial.model,
        "ANTHROPIC_MODEL": trial.model,
        "AGENT_SEED": str(trial.seed),
        "PWD": str(trial.workspace.absolute()),  # some agents read it instead of calling getcwd
        "TASK_FILE": str(trial.task_file.absolute()),
    }
    if len(trial.task.prompt.encode()) <= PROMPT_BYTES:
        env["TASK_PROMPT"] = trial.task.prompt
    return env | {name: expand(value, trial) for name, value in extra.items()}


def agent_result(ended: Ended, reward: Graded = NO_REWARD) -> AgentResult:
    """The result of an agent that ran as a process."""
    if ended.ended_by == "timeout":
        end = AgentEnd.TIMED_OUT
    else:
        end = AgentEnd.EXITED if ended.failure is None else AgentEnd.CRASHED
    return AgentResult(
        end,
        error=ended.failure,
        wall_s=ended.wall_s,
        reward=reward.value,
        reward_parts=reward.parts,
        metrics={
            "agent_cpu_s": ended.cpu_s,
            "supervisor_cpu_s": ended.supervisor_cpu_s,
            "agent_peak_memory_bytes": ended.peak_memory_bytes,
            "agent_output_bytes": ended.output_bytes,
            "agent_left_over_processes": ended.left_over,
        },
    )
