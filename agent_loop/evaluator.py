"""Evaluates the policy on held-out tasks: success, mean reward and pass@k, per source.

Invariant: evaluation runs in EVAL sessions (the agent's own sampling, no trainable token), and its
rollouts are used in the report only. A failed trial is counted and left out of every mean.

Evaluations of the same tasks are compared by differences of success, paired by task: a difference
is taken over the tasks that both evaluations judged, because other tasks may be easier or harder.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import Field

from agent_loop.producers.groups import GroupRun
from agent_loop.producers.protocol import RunsTrials
from agent_loop.records import Group, Rollout, RolloutStatus, Task
from proxy.records import SessionKind
from proxy.run_files.intervals import bootstrap_interval, wilson_interval
from proxy.settings.section import Section


class EvalConfig(Section):
    """The `eval` section of a run. Example: EvalConfig(repeats=4)"""

    before: bool = True
    """Evaluate before the first step."""
    after: bool = True
    """Evaluate after the last step."""
    every: int = Field(0, ge=0)
    """Steps between evaluations; 0: none in between."""
    repeats: int = Field(1, ge=1)
    """Trials per held-out task; more than 1 also gives pass@k for each power of two up to it."""
    limit: int | None = Field(None, ge=1)
    """Number of held-out tasks to use; None: all."""
    success_at: float = 1.0
    """A rollout whose reward is at least this is a success."""

    @property
    def ks(self) -> tuple[int, ...]:
        """The k of pass@k. Example: EvalConfig(repeats=5).ks == (1, 2, 4)"""
        return tuple(2**i for i in range(self.repeats.bit_length()))


@dataclass(frozen=True, slots=True)
class Score:
    """Example: Score(success=0.75, interval=(0.53, 0.89), mean_reward=0.8, pass_at_k={1: 0.75},
    tasks=20, rollouts=20, failed=0, mean_turns=3.2)"""

    success: float
    """Mean over tasks of the share of its rollouts that succeeded; NaN without a rollout."""
    interval: tuple[float, float]
    """95 % Wilson interval of `success` over tasks, because rollouts of one task are not
    independent."""
    mean_reward: float
    pass_at_k: Mapping[int, float]
    tasks: int
    rollouts: int
    failed: int
    mean_turns: float


@dataclass(frozen=True, slots=True)
class EvalReport:
    """The scores of one evaluation, and its rollouts."""

    version: int
    overall: Score
    per_source: Mapping[str, Score]
    rollouts: Sequence[Rollout]
    per_agent: Mapping[str, Score] = field(default_factory=dict)
    """Empty in a run with one agent."""

    def as_dict(self) -> dict[str, Any]:
        """The report without its rollouts, for `summary.json`."""
        values = {
            "version": self.version,
            **asdict(self.overall),
            "per_source": {name: asdict(score) for name, score in self.per_source.items()},
        }
        if self.per_agent:
            agents = {name: asdict(score) for name, score in self.per_agent.items()}
            values["per_agent"] = agents
        return values


class Evaluator:
    """Example: report = await Evaluator(loop, tasks, EvalConfig(repeats=4)).evaluate(version=12)"""

    def __init__(
        self,
        loop: RunsTrials,
        tasks: Sequence[Task],
        config: EvalConfig,
        *,
        concurrency: int = 32,
        seed: int = 0,
    ) -> None:
        """At most `concurrency` trials run at the same time."""
        self._loop = loop
        self._tasks = tasks
        self._config = config
        self._concurrency = concurrency
        self._seed = seed

    @property
    def trials(self) -> int:
        """Number of trials of an evaluation."""
        return len(self._tasks) * self._config.repeats

    async def evaluate(self, version: int) -> EvalReport:
        """Runs every task `repeats` times, with the same seeds in each evaluation. Training may
        continue at the same time."""
        slots = asyncio.Semaphore(self._concurrency)
        async with asyncio.TaskGroup() as running:
            started = [
                running.create_task(
                    GroupRun(
                        self._loop,
                        task,
                        number=number,
                        size=self._config.repeats,
                        seed=self._seed,
                        version=lambda: version,
                        slots=slots,
                        kind=SessionKind.EVAL,
                    ).run()
                )
                for number, task in enumerate(self._tasks)
            ]
        return self._report(version, [group.result() for group in started])

    def _report(self, version: int, groups: Sequence[Group]) -> EvalReport:
        sources = sorted({group.task.source for group in groups})
        agents = sorted({group.task.agent for group in groups} - {""})
        return EvalReport(
            version,
            score(groups, self._config),
            {
                source: score([g for g in groups if g.task.source == source], self._config)
                for source in sources
            },
            [rollout for group in groups for rollout in group.rollouts],
            {
                agent: score([g for g in groups if g.task.agent == agent], self._config)
                for agent in agents
            },
        )


def score(groups: Sequence[Group], config: EvalConfig) -> Score:
    judged = [[r for r in group.rollouts if is_judged(r)] for group in groups]
    judged = [rollouts for rollouts in judged if rollouts]
    successes = [
        sum(r.reward is not None and r.reward >= config.success_at for r in rollouts)
        for rollouts in judged
    ]
    flat = [rollout for rollouts in judged for rollout in rollouts]
    share = _mean([c / len(rollouts) for c, rollouts in zip(successes, judged, strict=True)])
    counted = [(len(rollouts), c) for c, rollouts in zip(successes, judged, strict=True)]
    return Score(
        success=share,
        interval=wilson_interval(share, len(judged)),
        mean_reward=_mean([r.reward for r in flat if r.reward is not None]),
        pass_at_k={k: _mean([pass_at_k(n, c, k) for n, c in counted if n >= k]) for k in config.ks},
        tasks=len(judged),
        rollouts=len(flat),
        failed=sum(len(group.rollouts) for group in groups) - len(flat),
        mean_turns=_mean([float(r.num_turns) for r in flat]),
    )


def pass_at_k_intervals(
    groups: Sequence[Group], config: EvalConfig
) -> Mapping[int, tuple[float, float]]:
    """95 % intervals of `Score.pass_at_k`, by the bootstrap over tasks."""
    estimates: dict[int, list[float]] = {k: [] for k in config.ks}
    for group in groups:
        judged = [rollout for rollout in group.rollouts if is_judged(rollout)]
        correct = sum(r.reward is not None and r.reward >= config.success_at for r in judged)
        for k, found in estimates.items():
            if len(judged) >= k:
                found.append(pass_at_k(len(judged), correct, k))
    return {k: bootstrap_interval(found) for k, found in estimates.items()}


def pass_at_k(n: int, correct: int, k: int) -> float:
    """1 − C(n−c, k) / C(n, k): the unbiased estimate of Chen et al. 2021 (arXiv 2107.03374)."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def is_judged(rollout: Rollout) -> bool:
    """Whether the rollout counts in a `Score`."""
    return (
        rollout.status in (RolloutStatus.DONE, RolloutStatus.TRUNCATED)
        and rollout.reward is not None
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
