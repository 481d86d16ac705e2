"""`Fit`: the training loop of a run.

    sample ─▶ train ─▶ weights ─▶ metrics ─▶ evaluate and save, when they are due

`TrainOn.on` is one training step, from rollouts to new weights. Rank 0 executes it, in a thread or
in a Ray actor; the loop itself never blocks. The mains differ only in the `Producer` that their
batches come from.

Invariant: a step counts once its weights are in the engines and its metrics are written; a
checkpoint holds exactly the steps that count, with the producer's state after the last of them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from agent_loop.evaluator import EvalConfig, EvalReport
from agent_loop.producers.protocol import Producer
from agent_loop.records import Group
from proxy.settings.late_section import load_extra
from trainer.algorithms.token_loss import Metrics
from trainer.batch import Batch, trained_batch
from trainer.checkpoint import Checkpoints, CheckpointUploads
from trainer.cluster.engines import RunEngines
from trainer.cluster.rank_zero import RankZero, Save
from trainer.errors import CheckpointError, TrainingError
from trainer.learning.learner import Learner, RunState
from trainer.learning.policies import Learners
from trainer.learning.policy_metrics import of_policies, share_metrics
from trainer.ranks_config import TrainerSection
from trainer.run.control import Ended, RunControl, StopRequested
from trainer.run.log import RunLog, failure_of
from trainer.run.rollout_metrics import rollout_metrics, staleness_metrics
from trainer.run.token_log import TokenColumns

WITNESS = "trainer.extras.ledger.evidence:Witness"
NO_SIGNAL = "no signal: all advantages are 0 because"
"""What follows says which rewards were equal."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Example: StepResult({"actor/loss": 0.1, …}, step=7, version=6)"""

    metrics: Metrics
    step: int
    version: int
    tokens: TokenColumns | None = None
    """What the page shows of the trained tokens; None: it was not asked for."""
    evidence: Any = None
    """What the ledger says of the step; None: it was not asked for."""


@dataclass(frozen=True, slots=True)
class TrainOn:
    """One training step on a batch of groups."""

    groups: Sequence[Group]
    keep_tokens: bool = False
    """Whether the result has the `tokens`."""
    keep_evidence: bool = False
    """Whether the result has the `evidence`."""

    def on(self, learners: Learners) -> StepResult:
        """Executes the step.

        Raises:
            TrainingError: the batch has no token to train, or the tokens to train are not those
                that were sampled.
        """
        metrics: dict[str, Metrics] = {}
        tokens: list[TokenColumns] = []
        watched = load_extra(WITNESS)(learners) if self.keep_evidence else None
        with learners.engines_asleep():
            for name, groups in learners.parts(self.groups).items():
                learner = learners.trained[name]
                batch, metrics[name] = self._train(learner, groups)
                if name:
                    metrics[name] |= share_metrics(batch)
                if self.keep_tokens:
                    trained = learner.algorithm.trained_sequences(batch)
                    tokens.append(TokenColumns.of(batch, trained))
                if watched is not None:
                    watched.trained(name, learner, batch)
        learners.step_ended()
        shown = TokenColumns.joined(tokens) if tokens else None
        evidence = None if watched is None else watched.evidence()
        step, version = learners.step, learners.version
        return StepResult(of_policies(metrics), step, version, shown, evidence)

    def _train(self, learner: Learner, groups: Sequence[Group]) -> tuple[Batch, Metrics]:
        started = time.perf_counter()
        batch = trained_batch(groups)
        metrics = staleness_metrics(batch, learner.version)
        metrics |= learner.compute_logprobs(batch)
        learner.compute_ref_logprobs(batch)
        learner.compute_values(batch)
        metrics |= learner.compute_advantages(batch)
        metrics |= learner.update(batch)
        metrics |= learner.speed(batch, time.perf_counter() - started)
        return batch, metrics


class Evaluates(Protocol):
    """Implementation: `agent_loop.evaluator.Evaluator`."""

    @property
    def trials(self) -> int:
        """Number of trials of an evaluation."""
        ...

    async def evaluate(self, version: int) -> EvalReport: ...


@dataclass(slots=True)
class Fit:
    """Example:
    fit = Fit(config.trainer, config.eval, rank_zero, engines, producer, …)
    fit.resume_from(state)
    ended = await fit.run()
    """

    trainer: TrainerSection
    evals: EvalConfig
    rank_zero: RankZero
    engines: RunEngines
    producer: Producer
    evaluator: Evaluates | None
    """Evaluates the policy; None: there are no held-out tasks."""
    checkpoints: Checkpoints
    log: RunLog
    control: RunControl
    uploads: CheckpointUploads = field(default_factory=CheckpointUploads)
    """Copies the checkpoints to `trainer.checkpoint_mirror`."""
    preflight: Callable[[int], Coroutine[Any, Any, None]] | None = None
    """Runs a first trial alone, on weights of this version; None: there is none."""
    trials_per_step: int = 0
    """Number of trials of a step, for the progress line; 0 if they also run between steps."""
    step: int = 0
    """Number of steps that count."""
    version: int = 0
    """Version of the policy's weights."""
    best: float | None = None
    """Success rate of the best evaluation with a checkpoint."""
    produced: dict[str, Any] = field(default_factory=dict)
    """The producer's state after the last step that counts."""
    without_signal: int = 0
    """Number of steps in a row, up to the last one, in which every advantage was 0."""
    _counts: Counter[str] = field(default_factory=Counter)
    _saved_at: float = field(default_factory=time.monotonic)
    _why_equal: str = ""
    """Why the last step had no signal."""

    def resume_from(self, state: RunState) -> None:
        """Continues from a checkpoint's state; to be called before `run`."""
        self.step, self.version = state.step, state.version
        self.best = state.loop.get("best")
        self.produced = state.loop.get("producer", {})
        self.without_signal = state.loop.get("without_signal", 0)

    async def run(self) -> Ended:
        """Trains to the configured end, or until the run is asked to stop. The log has the end
        while the page still follows the run."""
        ended: Ended = "done"
        try:
            try:
                await self._train_to_the_end()
            except StopRequested:
                ended = "stopped"
            await self._save(must=True)
        except Exception as error:
            self.log.finish("failed", **failure_of(error))
            raise
        self.log.finish(ended)
        return ended

    async def _train_to_the_end(self) -> None:
        self.log.phase(self.step, "sending weights")
        await self.control.finish(self.engines.send_weights())
        if self.preflight is not None and not self.step:
            self.log.phase(self.step, "preflight", 1)
            await self.control.wait_for(self.preflight(self.version))
        if self.evals.before and "before" not in self.log.evaluations:
            await self._evaluate("before")
        self.producer.start(self.version, self.produced or None)
        self.produced = self.producer.state()
        self._counts = Counter(self.producer.counts)  # a restored producer has those of its past
        success = await self._evaluate_if_due()  # the run may have been stopped in the last one
        self._mark_best(success)
        while not (self._reaches_goal(success) or self._is_over()):
            await self._step()
            await self._check_signal()
            success = await self._evaluate_if_due()
            if self._is_best(success) or self._save_is_due():
                await self._save(success)
        last = self.log.evaluations.get("after", {"step": None})
        if self.evals.after and last["step"] != self.step:
            await self._evaluate("after")

    async def _step(self) -> None:
        clock, log = _Clock(), self.log
        log.phase(self.step + 1, "sampling", self.trials_per_step)
        groups = await self.control.wait_for(self.producer.next_batch(self.version))
        clock.lap("sample")

        log.phase(self.step + 1, "training")
        train = TrainOn(groups, log.keeps_tokens, log.keeps_evidence)
        trained = await self.control.finish(self.rank_zero.ask(train))
        metrics = rollout_metrics(groups, success_at=self.evals.success_at) | trained.metrics
        clock.lap("train")

        if trained.version != self.version:
            log.phase(self.step + 1, "sending weights")
            metrics |= await self.control.finish(self.engines.send_weights())
            self.producer.set_version(trained.version)
        clock.lap("sync")

        self.step, self.version = trained.step, trained.version
        self.produced = self.producer.state()
        metrics |= clock.metrics(metrics.get("rollout/sampled_tokens", 0.0))
        metrics |= {f"groups/{what}": float(n) for what, n in self._new_counts().items()}
        metrics["policy_version"] = float(self.version)
        self.without_signal = 0 if has_signal(metrics) else self.without_signal + 1
        metrics["signal/steps_without"] = float(self.without_signal)
        self._why_equal = why_equal(groups, self.evals.success_at)
        log.step(self.step, metrics, groups, trained.tokens, trained.evidence)

    def _new_counts(self) -> dict[str, int]:
        """Number of groups since the last step, by outcome."""
        before, self._counts = self._counts, Counter(self.producer.counts)
        return {what: count - before[what] for what, count in self._counts.items()}

    async def _check_signal(self) -> None:
        """
        Raises:
            TrainingError: `trainer.no_signal_steps` in a row had none; the run is saved.
        """
        if not self.without_signal:
            return
        self.log.progress.say(f"step {self.step}: {NO_SIGNAL} {self._why_equal}")
        limit = self.trainer.no_signal_steps
        if limit and self.without_signal >= limit:
            await self._save(must=True)
            raise TrainingError(
                f"{self.without_signal} steps in a row without a signal (trainer.no_signal_steps="
                f"{limit}): {NO_SIGNAL} {self._why_equal}; the verdict of the run says what to do"
            )

    async def _evaluate_if_due(self) -> float | None:
        """Evaluates if an evaluation is due and not made; returns the success rate, or None."""
        every, made = self.evals.every, str(self.step) in self.log.evaluations
        if not every or not self.step or self.step % every or made:
            return None
        return await self._evaluate(str(self.step))

    async def _evaluate(self, name: str) -> float | None:
        """Evaluates; returns the success rate, or None without held-out tasks or a judged trial."""
        if self.evaluator is None:
            return None
        self.log.phase(self.step, f"evaluation {name}", self.evaluator.trials)
        self.producer.pause()
        try:
            report = await self.control.wait_for(self.evaluator.evaluate(self.version))
        finally:
            self.producer.resume()
        self.log.evaluation(self.step, name, report)
        return report.overall.success if report.overall.rollouts else None

    def _is_best(self, success: float | None) -> bool:
        return success is not None and (self.best is None or success > self.best)

    def _mark_best(self, success: float | None) -> None:
        """Marks the checkpoint with which the run continues, if it is the best. A failure is a
        warning."""
        saved = self.checkpoints.latest()
        if saved is None or not self._is_best(success):
            return
        self.best = success
        try:
            self.checkpoints.mark_best(saved, {"best": success})
        except CheckpointError as error:
            self.log.progress.say(f"warning: {error}")

    def _reaches_goal(self, success: float | None) -> bool:
        goal = self.trainer.stop_at_success
        if goal is None or success is None or success < goal:
            return False
        self.log.progress.say(f"success {success:.3f} reaches {goal}: stopping early")
        return True

    async def _save(self, success: float | None = None, *, must: bool = False) -> None:
        """Writes a checkpoint of this step. A failure is a warning, unless the checkpoint `must` be
        written and copied, as at the end of the run."""
        if self.step != self.log.saved_step:
            await self._write(success, must=must)
        if must:
            await self.control.finish(self.uploads.finish())

    async def _write(self, success: float | None, *, must: bool) -> None:
        self.log.phase(self.step, "saving")
        self.log.complete_ledger()
        await self.control.finish(self.uploads.room(self.log.progress.say))
        is_best = self._is_best(success)
        best = success if is_best else self.best
        request = Save(self.checkpoints, self._loop_state(best), is_best)
        try:
            await self.control.finish(self.rank_zero.ask(request))
        except CheckpointError as error:
            if must:
                raise
            self.log.progress.say(f"warning: {error}")
            return
        self.best = best
        self.log.saved_step = self.step
        self._saved_at = time.monotonic()
        self.uploads.start(self.checkpoints.latest(), self.log.folder)
        self.producer.acknowledge(self.produced)

    def _loop_state(self, best: float | None) -> dict[str, Any]:
        """The loop's state that `resume_from` reads."""
        return {
            "producer": self.produced,
            "best": best,
            "without_signal": self.without_signal,
        }

    def _save_is_due(self) -> bool:
        steps, seconds = self.trainer.save_every, self.trainer.save_every_s
        by_steps = bool(steps) and self.step % steps == 0
        return by_steps or (bool(seconds) and time.monotonic() - self._saved_at >= seconds)

    def _is_over(self) -> bool:
        limits = self.trainer
        late = limits.max_wall_s is not None and self.log.wall_s >= limits.max_wall_s
        return late or self.step >= limits.steps


def has_signal(metrics: Mapping[str, float]) -> bool:
    """Whether a step had something to learn from: an advantage other than 0, or a teacher."""
    has_advantage = bool(metrics["advantage/min"] or metrics["advantage/max"])
    return has_advantage or "actor/distillation_loss" in metrics


def why_equal(groups: Sequence[Group], success_at: float) -> str:
    """Which rewards were equal, in a step without a signal."""
    rewards = [r.reward for g in groups for r in g.rollouts if r.trainable and r.reward is not None]
    if rewards and min(rewards) >= success_at:
        return "every rollout succeeded"
    if rewards and max(rewards) < success_at and min(rewards) == max(rewards):
        return f"no rollout succeeded: every reward is {rewards[0]:g}"
    return "the rewards that are compared are equal: each task was always solved or never"


class _Clock:
    """Measures the seconds of each phase of a step."""

    def __init__(self) -> None:
        self._started = self._last = time.perf_counter()
        self._laps: Metrics = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self._laps[f"time/{name}_s"] = now - self._last
        self._last = now

    def metrics(self, tokens: float) -> Metrics:
        """The seconds and the throughput of a step that sampled this number of tokens."""
        total = self._last - self._started
        return self._laps | {
            "time/step_s": total,
            "throughput/tokens_per_s": tokens / total,
            "throughput/sample": tokens / self._laps["time/sample_s"],
            "throughput/train": tokens / self._laps["time/train_s"],
        }
