"""Trials of agents on a model behind another endpoint than our proxy: a baseline.

The agent calls the endpoint itself, in OpenAI's or Anthropic's dialect. Nothing is recorded, so
these rollouts have no tokens, and a judge, which reads the recorded answers, cannot grade them.
Invariant: a trial that fails is `failed`, never a reward of 0.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import shortuuid

from agent_loop.errors import AgentLoopError
from agent_loop.launchers.left_files import remove_folder
from agent_loop.launchers.protocol import Launcher
from agent_loop.processes.threads import run_to_end
from agent_loop.records import (
    AgentEnd,
    FinishedTrial,
    Rollout,
    RolloutStatus,
    Task,
    Trial,
)
from agent_loop.rewards.protocol import RewardSource
from agent_loop.trial.config import TrialConfig
from proxy.records import Session, SessionKind, SessionStatus


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Example: Endpoint("https://api.anthropic.com", "sk-…", "claude-opus-4-5")"""

    url: str
    """With or without `/v1`."""
    api_key: str
    model: str

    @property
    def base_url(self) -> str:
        """With `/v1`, as OpenAI's SDKs expect it."""
        return with_v1(self.url)


def with_v1(url: str) -> str:
    """The URL of an endpoint with `/v1`, whether it has it or not."""
    return url.rstrip("/").removesuffix("/v1") + "/v1"


class EndpointLoop:
    """Runs trials whose agents call a model themselves, for `agent_loop.agents.AgentLoops`."""

    def __init__(
        self,
        endpoint: Endpoint,
        launcher: Launcher,
        rewards: RewardSource,
        trials_dir: Path,
        trial: TrialConfig,
        hidden: Sequence[Path] = (),
        shown: Sequence[Path] = (),
    ) -> None:
        self._endpoint = endpoint
        self._launcher = launcher
        self._rewards = rewards
        self._trials_dir = trials_dir
        self._trial = trial
        self._wall = trial.wall((trials_dir, *hidden), shown)

    async def run(
        self, task: Task, *, kind: SessionKind, seed: int = 0, version: int = 0
    ) -> Rollout:
        """One trial without retries; `kind` and `version` have no meaning here."""
        started, started_at = time.monotonic(), time.time()
        name = re.sub("[^A-Za-z0-9._-]+", "_", task.task_id)[:80]
        trial = self._make(f"{name}-{shortuuid.uuid()[:12]}", task, seed)
        status, reward, parts, error = RolloutStatus.FAILED, None, {}, None
        try:
            trial.directory.mkdir(parents=True, mode=0o700)
            agent = await self._launcher.run(trial)
            graded = await self._rewards.grade(FinishedTrial(trial, agent, _nothing(trial), ()))
            reward, parts, error = graded.value, dict(graded.parts), agent.error
            if agent.end is AgentEnd.EXITED:
                status = RolloutStatus.DONE
            elif reward is not None:
                status = RolloutStatus.TRUNCATED
        except (AgentLoopError, OSError) as failure:
            error = f"{type(failure).__name__}: {failure}".splitlines()[0]
        finally:
            if not self._trial.keep_workspaces:
                await run_to_end(remove_folder, trial.workspace)
        return Rollout(
            trial_id=trial.trial_id,
            task=task,
            status=status,
            reward=reward,
            reward_parts=parts,
            error=error,
            times_s={"total": time.monotonic() - started},
            logs=str(trial.directory),
            seed=seed,
            started_at=started_at,
        )

    async def close(self) -> None:
        """Closes the launcher and the reward source."""
        await self._launcher.close()
        await self._rewards.close()

    def _make(self, trial_id: str, task: Task, seed: int) -> Trial:
        return Trial(
            trial_id=trial_id,
            task=task,
            base_url=self._endpoint.base_url,
            api_key=self._endpoint.api_key,
            model=self._endpoint.model,
            directory=self._trials_dir / trial_id,
            timeout_s=self._trial.timeout_s,
            seed=seed,
            wall=self._wall,
            hidden_fields=self._trial.fields_hidden,
        )


def _nothing(trial: Trial) -> Session:
    """A session without a record."""
    return Session(
        trial.trial_id, b"", SessionKind.EVAL, SessionStatus.COMPLETED, time.time(), time.time()
    )
