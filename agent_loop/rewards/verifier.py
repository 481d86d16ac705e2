"""Reward from a verifier command, run in the trial's working directory after the agent has ended.

The reward is the first of these that exists:

    reward.json in $REWARD_DIR    a number, or a dictionary of numbers whose entry `key` trains
    reward.txt in $REWARD_DIR     a number
    the exit code                 by `exit_codes`; by default, 0 gives 1.0 and 1 gives 0.0

If `reward_file` is set, that file must exist. Invariant: a verifier that does not reach a verdict
raises `RewardError` and never gives a reward of 0. This is the case if it was killed, timed out or
was not found, if its exit code is not in `exit_codes`, if there is an uncaught exception on its
standard error, or if a file does not hold a finite number. A verifier that runs the agent's program
must therefore capture that program's standard error, or write a reward file and exit with 0.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import orjson
from pydantic import Field

from agent_loop.errors import LaunchError, RewardError
from agent_loop.processes.environment import Variables, expand, inherited_environment
from agent_loop.processes.host import Ended, Job, Limits, ProcessHost
from agent_loop.processes.readable import declared
from agent_loop.records import AgentResult, FinishedTrial, Graded, Trial
from agent_loop.reward_values import graded
from agent_loop.rewards.bench import judge
from agent_loop.rewards.protocol import OwnRewardConfig
from proxy.errors import ConfigurationError
from proxy.settings.section import Common

_CRASH = re.compile(
    r"^(?:  \+ Exception Group )?Traceback \(most recent call last\):"
    r"|^(?:SyntaxError|IndentationError|TabError): "
    r"|: No module named "
    r"|^Node\.js v[\d.]+$"
    r"|^Exception in thread \"",
    re.MULTILINE,
)
"""What Python, Node.js and the Java VM write to standard error after an uncaught exception."""
_SUMMARY = re.compile(r"^Ran \d+ tests? in ", re.MULTILINE)
"""What `unittest` writes after the tracebacks of failed tests; these tracebacks are a verdict."""
STDERR_TAIL_BYTES = 64 * 1024
"""Bytes at the end of standard error that are searched for an uncaught exception."""


class VerifierConfig(Variables, OwnRewardConfig):
    """Example: VerifierConfig(argv=("{python}", "{root}/verify.py"))"""

    argv: Common[tuple[str, ...]] = Field(min_length=1)
    """The program and its arguments, with placeholders as in the agent's command. It runs in the
    agent's working directory."""
    exit_codes: Mapping[int, float] = Field(default_factory=lambda: {0: 1.0, 1: 0.0})
    """Rewards by exit code, used if there is no reward file. Any other exit code is a failure of
    the verifier, and so is an uncaught exception: the trial has no reward."""
    reward_file: Literal["reward.json", "reward.txt"] | None = None
    """The file that the verifier must write; None: it may write either file, or neither, in which
    case the exit code counts."""
    limits: Limits = Limits()

    def build(self) -> Verifier:
        return Verifier(self)


class Verifier:
    """Runs the program once per trial and reads its verdict."""

    def __init__(self, settings: VerifierConfig) -> None:
        """Raises ConfigurationError: the program does not exist, or what is shown."""
        self._settings = settings
        self._shown = declared("verifier.show", settings.show)
        self._host = ProcessHost()
        program = settings.argv[0]
        if "{" not in program and shutil.which(program) is None:
            raise ConfigurationError(
                f"verifier command {program!r} is not an executable on PATH; "
                "install it, or give its full path"
            )

    async def grade(self, finished: FinishedTrial) -> Graded:
        trial, agent = finished.trial, finished.agent
        # Created after the agent has ended, so that the agent cannot have written into it.
        rewards = trial.directory / "reward"
        try:
            rewards.mkdir()
            # The agent could have written into its own task file.
            task = orjson.dumps(dict(trial.task.data), default=str)
            (rewards / "task.json").write_bytes(task)
            ended = await judge(
                self._host,
                self._job(trial, agent, rewards),
                trial,
                "verifier",
                files=self._shown,
                named={name: expand(value, trial) for name, value in self._settings.env.items()},
            )
        except (LaunchError, OSError) as error:
            raise RewardError(f"verifier: {error}") from error
        return self._read(rewards, ended, await asyncio.to_thread(_last_words, trial))

    async def close(self) -> None:
        await self._host.close()

    def _job(self, trial: Trial, agent: AgentResult, rewards: Path) -> Job:
        settings = self._settings
        env = inherited_environment(settings.pass_env) | {
            "TASK_FILE": str((rewards / "task.json").absolute()),
            "TRIAL_DIR": str(trial.agent_directory.absolute()),
            "REWARD_DIR": str(rewards.absolute()),
            "AGENT_LOG": str((trial.directory / "agent.log").absolute()),
            "AGENT_END": agent.end.value,
        }
        return Job(
            argv=[expand(part, trial) for part in settings.argv],
            cwd=trial.workspace,
            env=env | {name: expand(value, trial) for name, value in settings.env.items()},
            log=trial.directory / "verifier.log",
            stderr_log=trial.directory / "verifier.stderr.log",
            timeout_s=settings.timeout_s,
            limits=settings.limits,
            visible=(rewards,),
            seen_at=trial.seen_at,
        )

    def _read(self, rewards: Path, ended: Ended, stderr: str) -> Graded:
        settings = self._settings
        last_line = f": {line}" if (line := _last_line(stderr)) else ""
        if ended.ended_by == "timeout" or ended.exit_code is None or ended.exit_code < 0:
            raise RewardError(f"verifier: {ended.failure}{last_line}")
        names = ("reward.json", "reward.txt")
        wanted = (rewards / name for name in names if settings.reward_file in (None, name))
        file = next((path for path in wanted if path.exists()), None)
        if _is_crash(stderr) and (file is None or ended.exit_code != 0):
            raise RewardError(f"verifier: crashed, exit code {ended.exit_code}{last_line}")
        if file is not None:
            return graded(_parse(file), settings.key, file.name)
        if settings.reward_file is not None:
            raise RewardError(
                f"verifier: it wrote no {settings.reward_file} into $REWARD_DIR, exit code "
                f"{ended.exit_code}{last_line}"
            )
        if ended.exit_code not in settings.exit_codes:
            raise RewardError(
                f"verifier: exit code {ended.exit_code} is not in verifier.exit_codes "
                f"{sorted(settings.exit_codes)}{last_line}"
            )
        return Graded(settings.exit_codes[ended.exit_code])


def _is_crash(stderr: str) -> bool:
    after_tests = _SUMMARY.split(stderr)[-1]
    return _CRASH.search(after_tests) is not None


def _last_words(trial: Trial) -> str:
    """The end of the verifier's standard error."""
    with (trial.directory / "verifier.stderr.log").open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - STDERR_TAIL_BYTES))
        return file.read().decode(errors="replace") + "\n"


def _last_line(text: str) -> str:
    lines = text.split("\n")
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")


def _parse(path: Path) -> Any:
    text = path.read_bytes()
    if path.suffix == ".txt":
        return text.decode(errors="replace").strip()
    try:
        # The standard library's parser accepts NaN, so that the error says that the reward is NaN
        # and not that the file is broken JSON.
        return json.loads(text)
    except ValueError as error:
        raise RewardError(f"{path.name}: not JSON ({error}): {text[:80]!r}") from None
