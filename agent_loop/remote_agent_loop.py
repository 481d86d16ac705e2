"""One trial: session → agent → reward → Rollout.

Invariant: every trial has an id, a key, a directory and a recording that no other trial had, a
retry included; when `run` returns or is cancelled, its agent is ended and its session completed.

How a trial's end becomes a status (DESIGN.md, rule 6):

    the agent ended by itself                     → done (truncated if its last answer was)
    the agent ran out of time, or crashed         → truncated, and a verifier's reward stands
    it crashed without a reward, or on a call     → failed
      that was cut on our side
    it never had an answer from the model         → failed
    launcher, verifier or proxy failed            → failed, tried again up to `max_retries` times
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import shortuuid
from pydantic import BaseModel, ConfigDict, Field
from tenacity import AsyncRetrying, retry_if_exception, stop_after_delay, wait_exponential

from agent_loop.credit import CreditSettings, assign_credit
from agent_loop.errors import AgentLoopError
from agent_loop.launchers.protocol import AgentEnd, AgentResult, Launcher, Trial
from agent_loop.records import Rollout, RolloutStatus, Task
from agent_loop.rewards.protocol import Finished, Graded, RewardSource
from agent_loop.trajectory import build_segments
from proxy.client import ProxyClient, ProxyClientError
from proxy.record_format import RecordFormatError
from proxy.records import FinishReason, Session, SessionKind, Turn, TurnStatus

Result = TypeVar("Result")


class LoopSettings(BaseModel):
    """Example: LoopSettings(trials_dir=Path("runs/a/trials"), timeout_s=120)"""

    model_config = ConfigDict(extra="forbid", frozen=True)

    trials_dir: Path
    """Each trial's directory is made in it."""
    model: str = "policy"
    """The model name that agents are told."""
    timeout_s: float = Field(600.0, gt=0)
    """An agent's time."""
    session_margin_s: float = Field(300.0, gt=0)
    """A session lives this much longer than its agent may: for what comes before the agent starts
    (a queue, a sandbox's set-up), its reward and its collection."""
    max_retries: int = Field(1, ge=0)
    """New trials for one that failed on our side."""
    retry_base_delay_s: float = Field(0.0, ge=0)
    """Before the first of them, doubled for each further one."""
    sampling: Mapping[str, Any] = Field(default_factory=dict)
    """Pinned over the agent's own in TRAIN sessions. Example: {"temperature": 1.0}"""
    seeded: bool = False
    """Also pins the rollout's seed: reproducible sampling, slower in large batches on a GPU."""
    profile: str = "default"
    """The proxy's agent profile."""
    session_limits: Mapping[str, Any] = Field(default_factory=dict)
    """`max_turns`, `max_tokens`, …, as the proxy takes them."""
    credit: CreditSettings = CreditSettings()
    """Which turns the reward is credited to."""
    await_reward_s: float = Field(0.0, ge=0)
    """How long after its agent's end a trial waits for a reward to be posted; 0: what is posted
    until then counts."""
    keep_workspaces: bool = False
    """Working directories are removed after the reward; logs stay either way."""
    proxy_patience_s: float = Field(60.0, ge=0)
    """How long the proxy may be away (it is being restarted) at a trial's begin or end."""


class RemoteAgentLoop:
    """Example: rollout = await RemoteAgentLoop(proxy, launcher, rewards, settings).run(task, …)"""

    def __init__(
        self,
        proxy: ProxyClient,
        launcher: Launcher,
        rewards: RewardSource,
        settings: LoopSettings,
    ) -> None:
        self.proxy = proxy
        self._launcher = launcher
        self._rewards = rewards
        self.settings = settings

    async def run(
        self, task: Task, *, kind: SessionKind, seed: int = 0, version: int = 0
    ) -> Rollout:
        """A rollout of the task, whatever happens to its trials.

        Cancelling ends the agent and completes the session before it raises.
        """
        failures = 0
        while True:
            rollout = await self._try(task, kind, seed, version)
            if rollout.status is not RolloutStatus.FAILED or failures == self.settings.max_retries:
                rollout.metrics = {**rollout.metrics, "failed_attempts": failures}
                return rollout
            await asyncio.sleep(self.settings.retry_base_delay_s * 2**failures)
            failures += 1

    async def close(self) -> None:
        await self._launcher.close()
        await self._rewards.close()

    async def _try(self, task: Task, kind: SessionKind, seed: int, version: int) -> Rollout:
        started = time.monotonic()
        trial_id = f"{re.sub(r'[^A-Za-z0-9._-]+', '_', task.task_id)[:80]}-{shortuuid.uuid()[:12]}"
        rollout = Rollout(trial_id, task, RolloutStatus.FAILED, None)
        rollout.seed, rollout.started_version = seed, version
        rollout.logs = str(self.settings.trials_dir / trial_id)
        try:
            await self._trial(rollout, kind)
        except (AgentLoopError, ProxyClientError, RecordFormatError, OSError) as error:
            rollout.status = RolloutStatus.FAILED
            rollout.error = f"{type(error).__name__}: {error}".splitlines()[0]
        finally:
            if not self.settings.keep_workspaces:
                work = Path(rollout.logs) / "work"
                await asyncio.to_thread(shutil.rmtree, work, ignore_errors=True)
        rollout.times_s = {**rollout.times_s, "total": time.monotonic() - started}
        return rollout

    async def _trial(self, rollout: Rollout, kind: SessionKind) -> None:
        opening = asyncio.ensure_future(self._open(rollout, kind))
        try:
            trial = await asyncio.shield(opening)
            agent = await self._launcher.run(trial)
            if (wait_s := self.settings.await_reward_s) > 0:
                await self._patiently(
                    lambda: self.proxy.wait_reward(trial.trial_id, timeout_s=wait_s)
                )
        except BaseException:
            await self._abandon(opening)
            raise
        await self._patiently(lambda: self.proxy.complete(trial.trial_id))
        session, turns = await self._patiently(lambda: self.proxy.get_turns(trial.trial_id))
        _record(rollout, agent, turns)
        began = time.monotonic()
        graded = await self._rewards.grade(Finished(trial, agent, session, turns))
        rollout.times_s = {**rollout.times_s, "verifier": time.monotonic() - began}
        credit = assign_credit(turns, graded.value, session.rewards, self.settings.credit)
        _conclude(rollout, agent, turns, _with_turn_rewards(graded, session))
        rollout.turn_returns = credit.returns
        eval_only = kind is SessionKind.EVAL
        untrained = range(len(turns)) if eval_only else credit.untrained
        rollout.segments = build_segments(turns, untrained=untrained)

    async def _open(self, rollout: Rollout, kind: SessionKind) -> Trial:
        settings = self.settings
        assert rollout.logs is not None
        directory = Path(rollout.logs)
        directory.mkdir(parents=True, mode=0o700)
        sampling = dict(settings.sampling) if kind is SessionKind.TRAIN else {}
        if settings.seeded:
            sampling["seed"] = rollout.seed
        # Should the answer be lost, asking again gives 409: a failed trial, and a new one.
        session = await self._patiently(
            lambda: self.proxy.create_session(
                rollout.trial_id,
                kind=kind,
                sampling=sampling,
                profile=settings.profile,
                limits=settings.session_limits,
                metadata={"task_id": rollout.task.task_id, "source": rollout.task.source},
                ttl_s=settings.timeout_s + settings.session_margin_s,
            )
        )
        return Trial(
            trial_id=session.trial_id,
            task=rollout.task,
            base_url=session.base_url,
            api_key=session.api_key,
            model=settings.model,
            directory=directory,
            timeout_s=settings.timeout_s,
            seed=rollout.seed,
        )

    async def _abandon(self, opening: asyncio.Future[Trial]) -> None:
        """Completes the session of a trial that was cancelled or failed, also while it was being
        made. With the proxy away it is left to expire."""
        await asyncio.wait([opening])
        if not opening.cancelled() and opening.exception() is None:
            with contextlib.suppress(ProxyClientError):
                await self.proxy.complete(opening.result().trial_id)

    async def _patiently(self, call: Callable[[], Awaitable[Result]]) -> Result:
        """Repeats a control call while the proxy is away."""
        async for attempt in AsyncRetrying(
            retry=retry_if_exception(_is_away),
            stop=stop_after_delay(self.settings.proxy_patience_s),
            wait=wait_exponential(multiplier=0.05, max=2.0),
            reraise=True,
        ):
            with attempt:
                result = await call()
        return result


def _is_away(error: BaseException) -> bool:
    return isinstance(error, ProxyClientError) and error.status in (0, 503)


def _with_turn_rewards(graded: Graded, session: Session) -> Graded:
    """Where turns or branches have rewards and the trial has none, their sum is the trial's."""
    of_turns = [reward.value for reward in session.rewards if reward.turn is not None]
    if graded.value is None and of_turns:
        return Graded(sum(of_turns), graded.parts)
    return graded


def _record(rollout: Rollout, agent: AgentResult, turns: Sequence[Turn]) -> None:
    """What the trial was, before it is judged."""
    answered = [turn for turn in turns if turn.sampled]
    rollout.num_turns = len(answered)
    rollout.forks = Counter(turn.fork_cause.value for turn in turns if turn.fork_cause)
    rollout.truncated_turns = tuple(
        turn.index for turn in answered if turn.finish_reason is FinishReason.LENGTH
    )
    rollout.times_s = {
        "agent": agent.wall_s,
        "generate": sum(turn.duration_s or 0.0 for turn in turns),
    }
    statuses = Counter(turn.status for turn in turns)
    rollout.metrics = {
        **agent.metrics,
        "sampled_tokens": sum(len(turn.sampled_ids) for turn in answered),
        "prompt_tokens": sum(len(turn.prompt_ids) for turn in turns),
        "cut_turns": statuses[TurnStatus.CUT] + statuses[TurnStatus.OPEN],
        "superseded_turns": statuses[TurnStatus.SUPERSEDED],
    }


def _conclude(rollout: Rollout, agent: AgentResult, turns: Sequence[Turn], graded: Graded) -> None:
    """Status and reward, by the table above."""
    rollout.reward, rollout.reward_parts = graded.value, graded.parts
    crashed = agent.end is AgentEnd.CRASHED
    cut = bool(turns) and turns[-1].status in (TurnStatus.CUT, TurnStatus.OPEN)
    if not rollout.num_turns:
        rollout.status = RolloutStatus.FAILED
        rollout.error = "the agent never had an answer from the model"
        if agent.error:
            rollout.error += f" ({agent.error}); see {rollout.logs}/agent.log"
    elif crashed and (cut or graded.value is None):
        rollout.status = RolloutStatus.FAILED
        rollout.error = f"the agent crashed: {agent.error}; see {rollout.logs}/agent.log"
    elif agent.end is not AgentEnd.EXITED:
        rollout.status = RolloutStatus.TRUNCATED
        rollout.error = f"the agent {agent.end.value.replace('_', ' ')}: {agent.error}"
    elif turns[-1].index in rollout.truncated_turns:
        rollout.status = RolloutStatus.TRUNCATED
        rollout.error = "its last answer reached the length limit"
    else:
        rollout.status = RolloutStatus.DONE
