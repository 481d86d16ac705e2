"""Reward from a verifier command, run in the trial's working directory after the agent has ended.

Where the reward is looked for, in this order: `reward.json` (a number, or a dictionary of
numbers) and `reward.txt` (a number) in `$REWARD_DIR`; else the exit code: 0 is 1.0, 1 to 125 is
0.0. Invariant: a verifier that was killed, timed out or could not be found is a `RewardError` and
never a reward of 0; so is one that leaves a file that is not a finite number.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from agent_loop.errors import LaunchError, RewardError
from agent_loop.launchers.environment import expand, inherited_environment
from agent_loop.launchers.processes import Ended, Job, Limits, ProcessHost
from agent_loop.launchers.protocol import AgentResult, Trial
from agent_loop.rewards.protocol import Finished, Graded, graded
from proxy.errors import ConfigurationError

LAST_VERDICT = 125
"""Exit codes above are the shell's: 126 not executable, 127 not found, 128+n killed."""


class VerifierSettings(BaseModel):
    """Example: VerifierSettings(argv=("{python}", "{root}/verify.py"))"""

    model_config = ConfigDict(extra="forbid", frozen=True)

    argv: tuple[str, ...] = Field(min_length=1)
    """Placeholders as for the agent's command. Its working directory is the agent's."""
    env: Mapping[str, str] = Field(default_factory=dict)
    timeout_s: float = Field(120.0, gt=0)
    key: str = "reward"
    """Which entry of a `reward.json` dictionary trains."""
    limits: Limits = Limits()


class Verifier:
    def __init__(self, settings: VerifierSettings) -> None:
        """Raises ConfigurationError: the program does not exist."""
        self._settings = settings
        self._host = ProcessHost()
        program = settings.argv[0]
        if "{" not in program and shutil.which(program) is None:
            raise ConfigurationError(
                f"verifier command {program!r} is not an executable on PATH; "
                "install it, or give its full path"
            )

    async def grade(self, finished: Finished) -> Graded:
        trial, agent = finished.trial, finished.agent
        # Made now, under a name that the agent was not told: it cannot have written into it.
        rewards = trial.directory / "reward"
        try:
            rewards.mkdir()
            ended = await self._host.run(self._job(trial, agent, rewards))
        except (LaunchError, OSError) as error:
            raise RewardError(f"verifier: {error}") from error
        return self._read(rewards, ended)

    async def close(self) -> None:
        await self._host.close()

    def _job(self, trial: Trial, agent: AgentResult, rewards: Path) -> Job:
        settings = self._settings
        env = inherited_environment() | {
            "TASK_FILE": str(trial.task_file.absolute()),
            "TRIAL_DIR": str(trial.directory.absolute()),
            "REWARD_DIR": str(rewards.absolute()),
            "AGENT_LOG": str((trial.directory / "agent.log").absolute()),
            "AGENT_END": agent.end.value,
        }
        return Job(
            argv=[expand(part, trial) for part in settings.argv],
            cwd=trial.workspace,
            env=env | {name: expand(value, trial) for name, value in settings.env.items()},
            log=trial.directory / "verifier.log",
            timeout_s=settings.timeout_s,
            limits=settings.limits,
        )

    def _read(self, rewards: Path, ended: Ended) -> Graded:
        if ended.ended_by == "timeout" or ended.exit_code is None or ended.exit_code < 0:
            raise RewardError(f"verifier: {ended.failure}")
        as_json, as_text = rewards / "reward.json", rewards / "reward.txt"
        if as_json.exists():
            return graded(_parse(as_json), self._settings.key, "reward.json")
        if as_text.exists():
            text = as_text.read_text(errors="replace").strip()
            return graded(text, self._settings.key, "reward.txt")
        if ended.exit_code > LAST_VERDICT:
            raise RewardError(f"verifier: {ended.failure}, and no reward file")
        return Graded(1.0 if ended.exit_code == 0 else 0.0)


def _parse(path: Path) -> Any:
    text = path.read_bytes()
    try:
        # The standard library's parser: it reads the NaN that its writer writes, to be told so.
        return json.loads(text)
    except ValueError as error:
        raise RewardError(f"{path.name}: not JSON ({error}): {text[:80]!r}") from None
