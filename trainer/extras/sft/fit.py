"""`SftFit`: the loop of supervised fine-tuning.

    batch ─▶ train ─▶ metrics ─▶ held-out loss and checkpoint, when they are due

Invariant: a checkpoint holds exactly the steps whose metrics are written. A run that continues from
it trains the same batches in the same order as a run that was not interrupted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.algorithms.aggregation import Aggregation
from trainer.algorithms.token_loss import Metrics
from trainer.batch import Batch, imitation_batch
from trainer.checkpoint import Checkpoints, CheckpointUploads
from trainer.cluster.rank_zero import RankZero, Save
from trainer.errors import CheckpointError
from trainer.extras.sft.config import SftConfig
from trainer.extras.sft.demonstrations import Demonstration
from trainer.extras.sft.schedule import Schedule
from trainer.learning.learner import RunState
from trainer.learning.policies import Learners
from trainer.ranks_config import TrainerSection
from trainer.run.control import RunControl, StopRequested
from trainer.run.log import RunLog


def batch_of(demonstrations: Sequence[Demonstration]) -> Batch:
    """The demonstrations as one batch, whose common prefixes are computed once."""
    rollouts = [each.rollout for each in demonstrations]
    return imitation_batch(rollouts, [each.source for each in demonstrations])


@dataclass(frozen=True, slots=True)
class ImitateBatch:
    """One optimizer step on these demonstrations."""

    demonstrations: Sequence[Demonstration]
    aggregation: Aggregation

    def on(self, learners: Learners) -> Metrics:
        started = time.perf_counter()
        batch = batch_of(self.demonstrations)
        metrics = learners.only.imitate(batch, self.aggregation)
        seconds = time.perf_counter() - started
        metrics |= learners.only.speed(batch, seconds)
        metrics["time/step_s"] = seconds
        metrics["throughput/tokens_per_s"] = batch.input_tokens / seconds
        return metrics


@dataclass(frozen=True, slots=True)
class HeldOutLoss:
    """The mean of `−log p` over the answers' tokens of these demonstrations."""

    demonstrations: Sequence[Demonstration]
    batch_sessions: int

    def on(self, learners: Learners) -> float:
        total, tokens = 0.0, 0
        for start in range(0, len(self.demonstrations), self.batch_sessions):
            batch = batch_of(self.demonstrations[start : start + self.batch_sessions])
            total += learners.only.imitation_loss(batch) * batch.num_tokens
            tokens += batch.num_tokens
        return total / tokens


@dataclass(slots=True)
class SftFit:
    """Example:
    fit = SftFit(config.sft, config.trainer, rank_zero, schedule, held_out, digest, …)
    fit.resume_from(state)
    await fit.run()
    """

    config: SftConfig
    trainer: TrainerSection
    rank_zero: RankZero
    schedule: Schedule
    held_out: Sequence[Demonstration]
    digest: str
    """Identifies all demonstrations; see `Demonstrations`."""
    checkpoints: Checkpoints
    log: RunLog
    control: RunControl
    uploads: CheckpointUploads = field(default_factory=CheckpointUploads)
    """Copies the checkpoints to `trainer.checkpoint_mirror`."""
    step: int = 0
    """Number of steps that count."""
    _saved_at: float = field(default_factory=time.monotonic)

    def resume_from(self, state: RunState) -> None:
        """Continues from a checkpoint's state; to be called before `run`.

        Raises:
            CheckpointError: the run was begun with other demonstrations, or in another order.
        """
        if state.step and state.loop["demonstrations"] != self.digest:
            raise CheckpointError(
                f"{self.log.folder.path}: its sessions have changed since the run began, so that it"
                " cannot continue in the same order; begin a new run with trainer.resume=never"
            )
        order = self.schedule.order  # earlier releases did not store it
        if state.step and state.loop.get("order", order) != order:
            raise CheckpointError(
                f"{self.log.folder.path}: sft.batch_sessions, sft.held_out or trainer.seed has "
                f"changed since the run began, so that after step {state.step} some sessions would "
                "be trained twice and others never; set it as it was, or begin a new run with "
                "trainer.resume=never"
            )
        self.step = state.step

    async def run(self) -> bool:
        """Trains to the end, or until the run is asked to stop. Returns whether it reached the
        end."""
        try:
            await self._train()
        except StopRequested:
            await self._save()
            return False
        await self._save()
        return True

    async def _train(self) -> None:
        if self.held_out and not self.step:
            loss = await self._held_out_loss()
            self.log.progress.say(f"held-out loss before: {loss:.4f}")
        over = self._is_over()
        while not over:
            self.log.phase(self.step + 1, "training")
            request = ImitateBatch(self.schedule.batch(self.step + 1), self.config.aggregation)
            metrics = await self.control.finish(self.rank_zero.ask(request))
            self.step += 1
            over = self._is_over()
            metrics["sft/epoch"] = self.step / self.schedule.steps_per_epoch
            if self._held_out_is_due(over):
                metrics["sft/held_out_loss"] = await self._held_out_loss()
            self.log.step(self.step, metrics, ())
            if self._save_is_due():
                await self._save(must=False)
            if self.control.stopping:
                raise StopRequested

    async def _held_out_loss(self) -> float:
        self.log.phase(self.step, "held-out loss")
        request = HeldOutLoss(self.held_out, self.config.batch_sessions)
        return await self.control.finish(self.rank_zero.ask(request))

    def _held_out_is_due(self, over: bool) -> bool:
        every = self.config.held_out_every
        return bool(self.held_out) and (over or (every > 0 and self.step % every == 0))

    def _is_over(self) -> bool:
        limit = self.trainer.max_wall_s
        late = limit is not None and self.log.wall_s >= limit
        return late or self.step >= self.schedule.steps

    def _save_is_due(self) -> bool:
        steps, seconds = self.trainer.save_every, self.trainer.save_every_s
        by_steps = bool(steps) and self.step % steps == 0
        return by_steps or (bool(seconds) and time.monotonic() - self._saved_at >= seconds)

    async def _save(self, *, must: bool = True) -> None:
        """Writes a checkpoint of this step. A failure is a warning, unless it `must` be written and
        copied."""
        if self.step != self.log.saved_step:
            await self._write(must=must)
        if must:
            await self.control.finish(self.uploads.finish())

    async def _write(self, *, must: bool) -> None:
        await self.control.finish(self.uploads.room(self.log.progress.say))
        loop: dict[str, Any] = {"demonstrations": self.digest, "order": self.schedule.order}
        try:
            await self.control.finish(self.rank_zero.ask(Save(self.checkpoints, loop, best=False)))
        except CheckpointError as error:
            if must:
                raise
            self.log.progress.say(f"warning: {error}")
            return
        self.log.saved_step = self.step
        self._saved_at = time.monotonic()
        self.uploads.start(self.checkpoints.latest(), self.log.folder)
