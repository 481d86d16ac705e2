"""Starts an agent as a process: its environment variables, its working directory and its limits.

The launchers whose agents are processes of this machine start them here. Invariant: an agent gets
the key of its own session and no other key.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_loop.launchers.workspace import GIT, make_workspace
from agent_loop.processes.environment import (
    GPUS,
    Variables,
    behind_wall,
    expand,
    inherited_environment,
)
from agent_loop.processes.host import Ended, Job, ProcessConfig, ProcessHost, own_folders
from agent_loop.processes.readable import own_python, readable
from agent_loop.records import NO_REWARD, AgentEnd, AgentResult, Graded, Trial
from proxy import wall
from proxy.machine.direct_hosts import with_direct_hosts

_log = logging.getLogger(__name__)

PROMPT_BYTES = 128_000
"""Maximum size of TASK_PROMPT, because Linux allows 131,072 bytes per environment string; a longer
prompt is in TASK_FILE only."""
SOCKETS_BYTES = 80
"""Maximum size of TMUX_TMPDIR: with `/tmux-UID/NAME` it is the path of a socket, which can have 107
bytes. In a longer folder tmux could not start; there all trials share one server, as without it."""


class ProgramConfig(Variables):
    """What the sections of launchers that start processes have in common."""

    template: str | None = None
    """Each trial's working directory is a copy of this folder, or a checkout of
    `git+REPOSITORY#REVISION`; may hold `{task.FIELD}`. None: an empty directory."""


async def run_agent(
    host: ProcessHost,
    trial: Trial,
    settings: ProgramConfig,
    process: ProcessConfig,
    *,
    argv: Sequence[str] = (),
    call: Mapping[str, Any] | None = None,
    visible: Sequence[Path] = (),
    lifeline: socket.socket | None = None,
) -> Ended:
    """Runs the agent in a new working directory, to its end or its deadline. The agent is the
    program `argv`, whose placeholders are replaced, or the function call `call`. `visible`: files
    that it can write besides the trial's own. `lifeline`: see `ProcessHost.run`.

    Raises:
        LaunchError: the working directory cannot be made, or the agent cannot be started.
    """
    await make_workspace(trial, settings.template)
    env = agent_environment(trial, settings.env, process.pass_env)
    words = [expand(part, trial) for part in argv]
    shown = [] if trial.wall is None else _readable(trial, settings, words, env)
    if call is not None:
        shown += own_python()
    job = Job(
        argv=words,
        call=call,
        cwd=trial.workspace,
        env=env,
        log=trial.directory / "agent.log",
        timeout_s=trial.timeout_s,
        grace_s=process.grace_s,
        log_bytes=process.log_bytes,
        limits=process.limits,
        wall=trial.wall,
        visible=(*trial.visible, *visible),
        kept=own_folders(trial.wall, trial.home, trial.temporary),
        shown=shown,
        seen_at=trial.seen_at,
    )
    return await host.run(job, lifeline)


def _readable(
    trial: Trial, settings: ProgramConfig, argv: Sequence[str], env: Mapping[str, str]
) -> list[Path]:
    """What the agent reads besides its own files: its tools, its template, and the devices of GPUs
    if it may use them."""
    shown = readable(argv, env, {name: env[name] for name in settings.env}, trial.directory)
    if settings.template is not None and not settings.template.startswith(GIT):
        shown.append(Path(expand(settings.template, trial)))
    if env.get(GPUS) != "" and trial.wall is not None and not trial.wall.strict:
        shown += map(Path, wall.gpu_devices())
    return shown


async def call_agent(
    host: ProcessHost,
    trial: Trial,
    settings: ProgramConfig,
    process: ProcessConfig,
    argument: Mapping[str, Any],
) -> tuple[Ended, Path]:
    """Runs the function of a `function_host` with `argument`; returns also the file of its result.

    Raises:
        LaunchError: as `run_agent`.
    """
    result = trial.directory / "returned.json"
    result.touch()  # it is visible as itself, so the agent cannot replace it by a link
    from agent_loop.processes.seals import new_seal  # only where functions are agents

    seal = new_seal()
    call = {"argument": argument, "result": str(result.absolute()), "seal": seal}
    ended = await run_agent(host, trial, settings, process, call=call, visible=(result,))
    await asyncio.to_thread(_open_returned, result, seal, trial)
    return ended, result


def _open_returned(result: Path, seal: str, trial: Trial) -> None:
    from agent_loop.processes.functions import RETURNED_BYTES
    from agent_loop.processes.seals import SEAL_CHARS, open_sealed

    if result.is_symlink() or not result.is_file():
        return  # without a wall, an agent can have removed it
    size = result.stat().st_size
    if size > RETURNED_BYTES + SEAL_CHARS:
        return  # whoever reads it refuses it
    if not open_sealed(result, seal) and size:
        _log.warning("trial %s: what was returned is not what its function wrote", trial.trial_id)


def agent_environment(
    trial: Trial, extra: Mapping[str, str], pass_env: Sequence[str] = ()
) -> dict[str, str]:
    """The inherited variables and those named in `pass_env`, then the trial's, then `extra` with
    its placeholders replaced; later values replace earlier ones. No HTTP proxy is used for the
    session."""
    env = inherited_environment(pass_env) | session_variables(trial)
    if len(os.fsencode(sockets := str(trial.agent_directory.absolute()))) <= SOCKETS_BYTES:
        env["TMUX_TMPDIR"] = sockets  # or the first trial's end would kill the shells of all
    env["PWD"] = str(trial.workspace.absolute())  # some agents read it instead of calling getcwd
    if trial.wall is not None:
        env = behind_wall(env)
    env |= {name: expand(value, trial) for name, value in extra.items()}
    return with_direct_hosts(env, trial.base_url)


def session_variables(trial: Trial) -> dict[str, str]:
    """The variables by which an agent finds its session and its task."""
    root = trial.base_url.removesuffix("/v1")
    env = {
        "OPENAI_BASE_URL": trial.base_url,
        "OPENAI_API_BASE": trial.base_url,
        "OPENAI_API_KEY": trial.api_key,
        "ANTHROPIC_BASE_URL": root,
        "ANTHROPIC_API_KEY": trial.api_key,
        "GOOGLE_GEMINI_BASE_URL": root,
        "GEMINI_API_KEY": trial.api_key,
        "AGENT_MODEL": trial.model,
        "OPENAI_MODEL": trial.model,
        "ANTHROPIC_MODEL": trial.model,
        "AGENT_SEED": str(trial.seed),
        "TASK_FILE": str(trial.task_file.absolute()),
    }
    if len(trial.task.prompt.encode()) <= PROMPT_BYTES:
        env["TASK_PROMPT"] = trial.task.prompt
    return env


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
