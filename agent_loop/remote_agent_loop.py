"""One trial: session → agent → reward → Rollout.

Invariant: every trial, including a retry, has an id, a key, a directory and a recording of its own;
when `run` returns or is cancelled, the agent has ended and the session is completed.

The states of a trial, which is one `_TrialRun`:

    opening ──▶ running ──▶ collecting ──▶ grading ──▶ ended: a rollout, by `trial_outcome`
       │           │             │             │
       └───────────┴─────────────┴─────────────┴── error ──▶ ended: a failed rollout, after which
       │           │             │             │             `salvage` says what follows
       └───────────┴─────────────┴─────────────┴── cancelled ──▶ ended: raises CancelledError

A trial that leaves `opening` or `running` by an error or a cancellation completes its session.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import shortuuid

from agent_loop.errors import AgentLoopError, BranchError, LostAgentError, TrajectoryError
from agent_loop.launchers.left_files import remove_folder
from agent_loop.launchers.protocol import Launcher
from agent_loop.processes.threads import run_to_end
from agent_loop.records import (
    SEEN,
    AgentEnd,
    AgentResult,
    FinishedTrial,
    Rollout,
    RolloutStatus,
    Task,
    Trial,
)
from agent_loop.rewards.protocol import RewardSource
from agent_loop.trial.config import RecordingConfig, SamplingConfig, TrialConfig
from agent_loop.trial.folders import FinishedTrials
from agent_loop.trial.outcome import Attempt, failed_rollout, grade_trial
from agent_loop.trial.pictures import with_pictures
from agent_loop.trial.salvage import LostTrial, Retries, crashed_again
from proxy.client import ProxyClient, ProxyClientError, SessionHandle, patiently
from proxy.config import RetentionConfig
from proxy.records import (
    FOLDER,
    TRIAL_REWARD,
    BranchMode,
    Origin,
    Reward,
    RuleAction,
    Session,
    SessionKind,
    Turn,
    TurnStatus,
)
from proxy.records.binary import RecordFormatError
from proxy.wall import Wall

_log = logging.getLogger(__name__)

Result = TypeVar("Result")


class RemoteAgentLoop:
    """Runs trials, each in a directory of its own in `trials_dir`.

    Example:
        loop = RemoteAgentLoop(proxy, launcher, rewards, Path("runs/a/trials"))
        rollout = await loop.run(task, kind=SessionKind.TRAIN)
    """

    def __init__(
        self,
        proxy: ProxyClient,
        launcher: Launcher,
        rewards: RewardSource,
        trials_dir: Path,
        *,
        trial: TrialConfig | None = None,
        sampling: SamplingConfig | None = None,
        recording: RecordingConfig | None = None,
        hidden: Sequence[Path] = (),
        shown: Sequence[Path] = (),
        policy: str = "",
        trained: Sequence[str] = (),
        private_ports: Callable[[], frozenset[int]] = frozenset,
        finished: FinishedTrials | None = None,
        on_rollout: Callable[[Rollout], None] = lambda _: None,
    ) -> None:
        """What local agents see of this machine. `hidden`: files and folders that are empty for
        them, in addition to `trials_dir` (of which an agent sees its own part of its trial's
        directory). `shown`: what they can read with `sandbox: strict`, in addition to `trial.show`.
        `policy`: the policy that sessions sample from, except for the model names in
        `trial.policies`; empty: the engines' own weights. `trained`: the policies that are trained;
        empty: `policy` alone.
        `private_ports`: called in a thread before each trial; the TCP ports that the agent cannot
        connect to. The proxy's is not refused. `finished` removes folders of finished trials
        from `trials_dir`; None: all are kept. `on_rollout` is called with each rollout before it
        is returned."""
        self.proxy = proxy
        self.launcher = launcher
        self.rewards = rewards
        self.trials_dir = trials_dir
        self.on_rollout = on_rollout
        self.trial = trial or TrialConfig()
        self.sampling = sampling or SamplingConfig()
        self.recording = recording or RecordingConfig()
        self.policy = policy
        self.trained = tuple(trained) or (policy,)
        self.private_ports = private_ports
        self.finished = finished or FinishedTrials(trials_dir, RetentionConfig())
        self.wall = self.trial.wall((trials_dir, *hidden), shown)

    async def run(
        self,
        task: Task,
        *,
        kind: SessionKind,
        seed: int = 0,
        version: int = 0,
        origin: Origin | None = None,
    ) -> Rollout:
        """Returns a rollout of the task, even if all of its trials fail. With `origin`, the agent's
        first calls are answered from that recording.

        Cancelling ends the agent and completes the session before it raises.
        """
        config = self.trial
        retries = Retries(self._read, config.max_retries, config.salvage, origin)
        while True:
            trial_id = f"{re.sub('[^A-Za-z0-9._-]+', '_', task.task_id)[:80]}-{_unique()}"
            logs = str(self.trials_dir / trial_id)
            attempt = Attempt(
                trial_id,
                task,
                kind,
                seed,
                version,
                logs,
                retries.earlier,
                retries.origin,
                "" if origin is None or origin.salvage else f"{origin.session_id}@{origin.turn}",
                retries.lost_after,
                self.trained,
                time.time(),
            )
            trial = _TrialRun(self, attempt)
            rollout = await trial.run()
            failed = rollout.status is RolloutStatus.FAILED
            if not failed or not await retries.follows(trial.as_lost):
                self.on_rollout(rollout)
                return rollout
            await asyncio.sleep(config.retry_base_delay * 2 ** (retries.earlier.failed - 1))

    async def patiently(self, call: Callable[[], Awaitable[Result]]) -> Result:
        """Repeats a control call while the proxy cannot be reached, for at most `patience_s`."""
        return await patiently(call, self.recording.patience_s)

    async def _read(self, trial_id: str) -> tuple[Session, Sequence[Turn]]:
        return await self.patiently(lambda: self.proxy.get_turns(trial_id))

    async def close(self) -> None:
        """Closes the launcher, the reward source and the connections to the proxy."""
        await self.launcher.close()
        await self.rewards.close()
        await self.proxy.close()


class TrialState(StrEnum):
    """The states of a trial; see the module's docstring."""

    OPENING = "opening"
    """Its directory and its session are being made."""
    RUNNING = "running"
    """Its agent runs, the trial waits for a posted reward, or its session is being completed."""
    COLLECTING = "collecting"
    """Its turns are read."""
    GRADING = "grading"
    """The reward source judges it."""
    ENDED = "ended"


class _TrialRun:
    """One trial, from its session to its rollout."""

    def __init__(self, loop: RemoteAgentLoop, attempt: Attempt) -> None:
        self._loop = loop
        self._attempt = attempt
        self._directory = loop.trials_dir / attempt.trial_id
        self._started = time.monotonic()
        self._times_s: dict[str, float] = {}
        self._turns: Sequence[Turn] = ()
        """The recorded turns; empty until they are collected."""
        self._agent: AgentResult | None = None
        """How the agent ended; None until it has ended."""
        self._diverged = False
        self._crashed_again = False
        self.state = TrialState.OPENING

    @property
    def as_lost(self) -> LostTrial:
        """What `salvage` needs to know of the trial if it failed."""
        attempt = self._attempt
        return LostTrial(attempt.trial_id, attempt.origin, self._diverged, self._crashed_again)

    async def run(self) -> Rollout:
        opening = asyncio.ensure_future(self._open())
        try:
            trial = await asyncio.shield(opening)
            agent = await self._launch(trial)
            return await self._grade(await self._collect(trial, agent))
        except (AgentLoopError, ProxyClientError, RecordFormatError, OSError) as error:
            return self._failed(error)
        finally:
            if self.state in (TrialState.OPENING, TrialState.RUNNING):
                await self._abandon(opening)
            self.state = TrialState.ENDED
            await run_to_end(self._remove_folders)
            await run_to_end(self._loop.finished.add, self._attempt.trial_id)

    def _remove_folders(self) -> None:
        names = ["tmp", "began"]
        if not self._loop.trial.keep_workspaces:
            names += ["work", "home"]
        for name in names:
            remove_folder(self._directory / name)

    async def _open(self) -> Trial:
        loop, attempt, config = self._loop, self._attempt, self._loop.trial
        self._directory.mkdir(parents=True, mode=0o700)
        # If the response is lost, the repeated request gets 409: this trial fails and is retried.
        ttl_s = config.timeout_s + loop.launcher.overhead_s + config.await_reward_s
        session = await self._loop.patiently(lambda: self._session(ttl_s))
        return Trial(
            trial_id=session.trial_id,
            task=attempt.task,
            base_url=session.base_url,
            api_key=session.api_key,
            model=config.model_name,
            directory=self._directory,
            timeout_s=config.timeout_s,
            seed=attempt.seed,
            wall=await self._wall(session.base_url),
            hidden_fields=config.fields_hidden,
        )

    async def _session(self, ttl_s: float) -> SessionHandle:
        loop, attempt = self._loop, self._attempt
        metadata = {
            "task_id": attempt.task.task_id,
            "source": attempt.task.source,
            FOLDER: str(self._seen_directory),
        }
        settings: dict[str, Any] = {
            "kind": attempt.kind,
            "sampling": self._pinned(),
            "policies": self._policies,
            "limits": loop.sampling.session_limits,
            "metadata": metadata,
            "ttl_s": ttl_s,
        }
        if attempt.origin is not None:
            return await loop.proxy.branch(attempt.origin, attempt.trial_id, **settings)
        profile = loop.recording.profile
        return await loop.proxy.create_session(attempt.trial_id, profile=profile, **settings)

    @property
    def _seen_directory(self) -> Path:
        """The trial's directory as its programs see it."""
        directory = self._directory.resolve()
        return directory if self._loop.wall is None else directory.parent / SEEN

    async def _wall(self, base_url: str) -> Wall | None:
        loop = self._loop
        if loop.wall is None:
            return None
        ports = await asyncio.to_thread(loop.private_ports)
        return replace(loop.wall, ports=ports - {urlsplit(base_url).port})

    def _pinned(self) -> dict[str, float | int]:
        """The sampling parameters that the proxy enforces. An evaluation keeps the agent's own
        sampling; at most the seed is set."""
        sampling, attempt = self._loop.sampling, self._attempt
        pinned = sampling.pinned if attempt.kind is SessionKind.TRAIN else {}
        return {**pinned, "seed": attempt.seed} if sampling.seeded else pinned

    @property
    def _policies(self) -> dict[str, str]:
        own = {"": self._loop.policy} if self._loop.policy else {}
        return {**own, **self._loop.trial.policies}

    async def _launch(self, trial: Trial) -> AgentResult:
        self.state = TrialState.RUNNING
        self._times_s["opening"] = time.monotonic() - self._started
        self._agent = agent = await self._loop.launcher.run(trial)
        if (wait_s := self._loop.trial.await_reward_s) > 0:
            wait = self._loop.proxy.wait_reward
            await self._loop.patiently(lambda: wait(trial.trial_id, timeout_s=wait_s))
        return agent

    async def _abandon(self, opening: asyncio.Future[Trial]) -> None:
        """Completes the session of a trial that was cancelled or failed, even if the session was
        still being created, or was made before the opening failed. If the proxy does not answer,
        the session is left to expire."""
        await asyncio.wait([opening])
        if not opening.cancelled():
            opening.exception()  # otherwise asyncio logs that nobody has read it
        with contextlib.suppress(ProxyClientError):  # such as that there is none
            await self._loop.proxy.complete(self._attempt.trial_id)

    async def _collect(self, trial: Trial, agent: AgentResult) -> FinishedTrial:
        proxy = self._loop.proxy
        await self._loop.patiently(lambda: proxy.complete(trial.trial_id))
        self.state = TrialState.COLLECTING
        session, self._turns = await self._loop.patiently(lambda: proxy.get_turns(trial.trial_id))
        if session.marked(RuleAction.END) is None:
            await self._check_replay(trial, agent)
        return FinishedTrial(trial, agent, session, self._turns, proxy)

    async def _check_replay(self, trial: Trial, agent: AgentResult) -> None:
        """Refuses a branch whose recorded turns are not part of what its agent did, and an agent
        that ended early and can be continued.

        Raises:
            BranchError: a strict branch diverged, or a salvaging one did not replay every turn.
            LostAgentError: the trial can be continued.
        """
        attempt, ended = self._attempt, agent.end.value.replace("_", " ")
        missing = 0 if attempt.origin is None else await self._unreplayed(trial, attempt.origin)
        same = crashed_again(attempt.origin, agent, self._turns)
        self._crashed_again = same and not missing
        if agent.end in attempt.lost_after and self._turns and not self._crashed_again:
            raise LostAgentError(f"the agent {ended}: {agent.error}")
        if missing:
            self._diverged = agent.end is AgentEnd.EXITED
            raise BranchError(f"the agent {ended} before {missing} recorded turns were replayed")

    async def _unreplayed(self, trial: Trial, origin: Origin) -> int:
        """The number of answers that a salvaging branch trains and its agent did not get."""
        shown = await self._loop.patiently(lambda: self._loop.proxy.show(trial.trial_id))
        replay = shown["replay"]
        if replay["diverged"] and (origin.salvage or origin.mode is BranchMode.STRICT):
            self._diverged = True
            raise BranchError(f"the branch diverged: {replay['diverged'][0]}")
        answered = (TurnStatus.DONE, TurnStatus.CONTEXT)
        expected = {t.index for t in self._turns[: origin.turn] if t.status in answered}
        return len(expected - set(replay["turns"])) if origin.salvage else 0

    async def _grade(self, finished: FinishedTrial) -> Rollout:
        self.state = TrialState.GRADING
        loop = self._loop
        rollout = await grade_trial(
            self._attempt,
            finished,
            loop.rewards,
            loop.trial.credit,
            started=self._started,
            times_s=self._times_s,
        )
        await self._record(rollout)
        return await with_pictures(rollout, self._picture)

    async def _record(self, rollout: Rollout) -> None:
        """Gives the session its reward, which the page, `sessions list` and exports read there. If
        the proxy refuses it, the rollout counts all the same."""
        if rollout.reward is None:
            return
        reward = Reward(TRIAL_REWARD, rollout.reward, dict(rollout.reward_parts))
        proxy, trial_id = self._loop.proxy, rollout.trial_id
        try:
            await self._loop.patiently(lambda: proxy.add_reward(trial_id, reward))
        except ProxyClientError as error:
            _log.warning("session %s has no reward: %s", trial_id, error)

    async def _picture(self, sha256: str) -> bytes:
        proxy, trial_id = self._loop.proxy, self._attempt.trial_id
        try:
            return await self._loop.patiently(lambda: proxy.image(trial_id, sha256))
        except ValueError as error:
            raise TrajectoryError(f"session {trial_id!r}: {error}") from error

    def _failed(self, error: Exception) -> Rollout:
        return failed_rollout(
            self._attempt,
            f"{type(error).__name__}: {error}".splitlines()[0],
            agent=self._agent,
            turns=self._turns,
            times_s={**self._times_s, "total": time.monotonic() - self._started},
        )


def _unique() -> str:
    return str(shortuuid.uuid()[:12])
