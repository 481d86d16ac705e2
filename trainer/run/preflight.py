"""One trial from end to end before a run spends anything: session, agent, model, reward.

What `--check` cannot know shows here: an agent that does not start, a key that it does not use, a
verifier that crashes, a filter or a metric of your own that fails on a real trial. Invariant: the
trial is not trained; one task that fails does not end the run, two different ones do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from agent_loop.producers.protocol import RunsTrials
from agent_loop.records import Group, Rollout, RolloutStatus, Task
from proxy.records import SessionKind
from proxy.run_files.causes import cause_of
from proxy.run_files.trial_files import TrialFiles
from trainer.errors import TrainingError

LINES = 5


class Preflight:
    """Example: await Preflight(loop, tasks, 60.0, folder.trials, [check], print).run(version=0)"""

    def __init__(
        self,
        loop: RunsTrials,
        tasks: Sequence[Task],
        limit_s: float,
        trials: Path,
        checks: Sequence[Callable[[Group], object]],
        say: Callable[[str], None],
    ) -> None:
        """`tasks`: the one to try, and the one to try if it fails. `checks` are called with the
        trial as a group of one: what they raise ends the run."""
        self._loop = loop
        self._tasks = tasks[:2]
        self._limit_s = limit_s
        self._trials = trials
        self._checks = checks
        self._say = say

    async def run(self, version: int) -> None:
        """
        Raises:
            TrainingError: the trials failed or got no reward, or a part of the user's own failed.
        """
        rollout: Rollout | None = None
        for task in self._tasks:
            try:
                async with asyncio.timeout(self._limit_s):
                    rollout = await self._loop.run(task, kind=SessionKind.EVAL, version=version)
            except TimeoutError:
                self._say(f"preflight: its trial runs for {self._limit_s:g} s already: going on")
                return
            if rollout.status is not RolloutStatus.FAILED and rollout.reward is not None:
                self._check(Group("preflight", task, (rollout,)))
                return
        if rollout is not None:
            raise TrainingError(self._told(rollout))

    def _check(self, group: Group) -> None:
        for check in self._checks:
            try:
                check(group)
            except TrainingError:
                raise
            # What the user's code raises has no common type.
            except Exception as error:
                raise TrainingError(
                    f"preflight: a part of your own failed on the first trial: "
                    f"{type(error).__name__}: {error}"
                ) from error

    def _told(self, rollout: Rollout) -> str:
        files = TrialFiles(self._trials, rollout.trial_id)
        text = files.last_words(rollout.error or "")
        last = [line for line in text.splitlines() if line.strip()][-LINES:]
        lines = f"; its last lines: {' | '.join(last)}" if last else ""
        why = cause_of(rollout.error) if rollout.error else "it got no reward"
        return (
            f"preflight: {len(self._tasks)} trials of different tasks failed: {why}{lines}; its "
            f"folder is {self._trials / rollout.trial_id}"
        )
