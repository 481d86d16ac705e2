"""`Fit`: the training loop. Sample, learn, send the weights, and now and then evaluate and save.

It is the same for both mains: where the batches come from (`Producer`) is the whole difference.

Invariant: a step counts once its weights are in the engines and its metrics are written; a
checkpoint holds exactly the steps that count, with the producer's state after the last of them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from agent_loop.evaluator import EvalReport
from agent_loop.records import Group
from trainer.cluster.trainer import Trainer
from trainer.config import TrainerConfig
from trainer.errors import CheckpointError
from trainer.policy.token_loss import Metrics
from trainer.run.control import RunControl, StopRequested
from trainer.run.log import RunLog


class Producer(Protocol):
    """Implementations: `agent_loop.producers`, synchronous and asynchronous."""

    counts: Counter[str]
    """Groups by what became of them, over the run."""

    def start(self, version: int, state: Mapping[str, Any] | None = None) -> None:
        """Called once, when the engines have the weights; `state` is that of a checkpoint."""
        ...

    async def next_batch(self, version: int) -> list[Group]: ...

    def set_version(self, version: int) -> None:
        """The engines sample with these weights from now on."""
        ...

    def state(self) -> dict[str, Any]: ...

    def acknowledge(self, state: Mapping[str, Any]) -> None:
        """A checkpoint with this state is durable."""
        ...

    async def close(self) -> None: ...


class Evaluates(Protocol):
    """Implementation: `agent_loop.evaluator.Evaluator`."""

    async def evaluate(self, version: int) -> EvalReport: ...


@dataclass(slots=True)
class Fit:
    config: TrainerConfig
    trainer: Trainer
    producer: Producer
    evaluator: Evaluates | None
    """None: there are no held-out tasks."""
    log: RunLog
    control: RunControl
    best: float = -1.0
    """Success of the best evaluation that a checkpoint was made at."""
    produced: dict[str, Any] = field(default_factory=dict)
    """The producer's state after the last step that counts."""
    _counts: Counter[str] = field(default_factory=Counter)

    async def run(self) -> str:
        """To the configured end: `done`; or `stopped`, when it was asked to stop."""
        config, trainer = self.config, self.trainer
        try:
            self.log.progress.phase(trainer.step, "sending weights")
            await self.control.finish(trainer.sync_weights())
            if config.eval.before and "before" not in self.log.evaluations:
                await self._evaluate("before")
            self.producer.start(trainer.version, self.produced or None)
            self.produced = self.producer.state()
            while not self._over():
                await self._step()
                success = await self._scheduled_evaluation()
                if self._save_is_due() or success > self.best:
                    await self._save(success)
                if (goal := config.trainer.stop_at_success) is not None and success >= goal:
                    self.log.progress.say(f"success {success:.3f} reaches {goal}: stopping early")
                    break
            if config.eval.after and "after" not in self.log.evaluations:
                await self._evaluate("after")
        except StopRequested:
            await self._save(-1.0, must=True)
            return "stopped"
        await self._save(-1.0, must=True)
        return "done"

    async def _step(self) -> None:
        trainer, log = self.trainer, self.log
        clock = _Clock()
        log.progress.phase(trainer.step + 1, "sampling")
        groups = await self.control.wait_for(self.producer.next_batch(trainer.version))
        clock.lap("sample")
        log.progress.phase(trainer.step + 1, "training")
        metrics = await self.control.finish(trainer.learn(groups))
        clock.lap("train")
        if metrics["actor/update_steps"]:
            metrics |= await self.control.finish(trainer.sync_weights())
            self.producer.set_version(trainer.version)
        clock.lap("sync")
        metrics |= clock.metrics(metrics.get("rollout/sampled_tokens", 0.0))
        metrics |= {f"groups/{what}": float(n) for what, n in self._counted().items()}
        metrics["policy_version"] = float(trainer.version)
        self.produced = self.producer.state()
        log.step(trainer.step, metrics, [r for group in groups for r in group.rollouts])

    def _counted(self) -> dict[str, int]:
        """What became of groups since the last step."""
        before, self._counts = self._counts, Counter(self.producer.counts)
        return {what: count - before[what] for what, count in self._counts.items()}

    async def _scheduled_evaluation(self) -> float:
        """Its success; -1 when none is due."""
        every, step = self.config.eval.every, self.trainer.step
        if not every or step % every:
            return -1.0
        return await self._evaluate(str(step))

    async def _evaluate(self, name: str) -> float:
        if self.evaluator is None:
            return -1.0
        step = self.trainer.step
        self.log.progress.phase(step, f"evaluation {name}")
        evaluation = self.evaluator.evaluate(self.trainer.version)
        report = await self.control.wait_for(evaluation)
        self.log.evaluation(step, name, report)
        return report.overall.success

    async def _save(self, success: float, *, must: bool = False) -> None:
        """A failure is told, and ends the run only where it `must` be saved: at the end."""
        trainer = self.trainer
        if trainer.step == self.log.saved_step:
            return
        self.log.progress.phase(trainer.step, "saving")
        run = {"producer": self.produced, "best": max(self.best, success)}
        try:
            await self.control.finish(trainer.save(run, best=success > self.best))
        except CheckpointError as error:
            if must:
                raise
            self.log.progress.say(f"warning: {error}")
            return
        self.best = max(self.best, success)
        self.log.saved_step = trainer.step
        self.producer.acknowledge(self.produced)

    def _save_is_due(self) -> bool:
        every = self.config.trainer.save_every
        return bool(every) and self.trainer.step % every == 0

    def _over(self) -> bool:
        limits = self.config.trainer
        late = limits.max_wall_s is not None and self.log.wall_s >= limits.max_wall_s
        return late or self.trainer.step >= limits.steps


class _Clock:
    """Seconds per phase of a step."""

    def __init__(self) -> None:
        self._started = self._last = time.perf_counter()
        self._laps: Metrics = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self._laps[f"time/{name}_s"] = now - self._last
        self._last = now

    def metrics(self, tokens: float) -> Metrics:
        total = self._last - self._started
        return self._laps | {
            "time/step_s": total,
            "throughput/tokens_per_s": tokens / total,
            "throughput/sample": tokens / self._laps["time/sample_s"],
            "throughput/train": tokens / self._laps["time/train_s"],
        }
