"""What a run reports: metrics, finished trials, progress and the summary.

Invariant: `summary.json` is up to date: it is replaced after every step and every evaluation.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any, Literal, Protocol

from pydantic import Field

from agent_loop.evaluator import EvalReport, is_judged
from agent_loop.producers.protocol import Judges, Producer, ReportsProduction
from agent_loop.records import Group, Rollout, RolloutStatus
from proxy.machine.logs import LogLevel
from proxy.machine.secrecy import flat_config, without_credentials, without_secrets
from proxy.run_files.evidence import RunRecord
from proxy.run_files.formats import interval, percent
from proxy.run_files.intervals import bootstrap_interval
from proxy.run_files.lines import line_of
from proxy.run_files.tokens import remove_steps_after
from proxy.run_files.verdict import RunVerdict, VerdictJson, Word
from proxy.settings.late_section import load_extra
from proxy.settings.section import Common, Section
from trainer.run.folder import RunFolder
from trainer.run.metrics import (
    JsonlSink,
    MetricsLog,
    MlflowSink,
    Sink,
    TensorBoardSink,
    Transcript,
    WandbSink,
)
from trainer.run.now import NowFile
from trainer.run.own_metrics import OwnMetrics, own_metrics
from trainer.run.phases import EndedPhase, PhaseLog
from trainer.run.progress import Progress
from trainer.run.token_log import TokenColumns, TokenLog
from trainer.run.warned_errors import errors_as_warnings


class LoggingConfig(Section):
    """Section `logging`. Example: LoggingConfig(wandb_project="agents")"""

    tensorboard: bool = True
    """Write `tensorboard/` in addition to `metrics.jsonl`."""
    wandb_project: Common[str | None] = None
    """Project of Weights & Biases to log to in addition (package `wandb`): metrics, and at the end
    the report and the transcripts in it. A resumed run continues its run there. None: no
    logging to Weights & Biases."""
    mlflow_experiment: Common[str | None] = None
    """Experiment of MLflow to log to in addition (package `mlflow`): metrics, and at the end the
    report and the transcripts in it. A resumed run continues its run there. None: no logging to
    MLflow."""
    metrics: Common[tuple[OwnMetrics, ...]] = ()
    """Functions of your own, each of which returns metrics of a step's rollouts. They are also
    called with the rollouts of an evaluation, whose metrics have names like `eval/NAME`."""
    progress: Literal["auto", "rich", "plain", "none"] = "auto"
    """What the terminal shows. `auto`: a live display in a terminal, plain lines elsewhere."""
    log_level: Common[LogLevel] = "warning"
    """The least important log messages of the trainer on standard error; also `--log-level`. The
    proxy that the run starts takes its own from AGENTIC_PROXY_LOG_LEVEL."""
    token_bytes: int = Field(2**30, ge=0)
    """Size of `tokens/` above which the oldest steps are removed from it. The page shows from there
    the advantage of each trained token and its probability under the trainer. 0: nothing is
    written."""
    report_trials: Common[int] = Field(3, ge=0)
    """Number of held-out tasks of which the report shows a trial before training and one after, in
    full, next to each other. If it is not 0, two trials of training are shown as well."""


WARNINGS = 50
"""Different warnings that the summary counts one by one."""
WARNING_CHARS = 500
UNLOGGED = 1_000
"""Failed trials that are kept until their step, or the run, ends."""


class SeesRun(Protocol):
    """What gets the same as a `RunLog`. Implementation: the extra `telemetry`."""

    def phase(self, ended: EndedPhase) -> None: ...

    def step(self, step: int, metrics: Mapping[str, float], groups: Sequence[Group]) -> None: ...

    def trial_ended(self, rollout: Rollout) -> None: ...

    def metrics(self, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class WritesLedger(Protocol):
    """Writes what each step trained. Implementation: the extra `ledger`."""

    def left_out(self, group: Group, reason: str) -> None: ...

    def write(self, step: int, groups: Sequence[Group], evidence: Any) -> None: ...

    def finish(self) -> None: ...

    def close(self) -> None: ...


class RunLog:
    """Example:
    log = RunLog(config.logging, folder, steps=100)
    log.step(1, {"reward/mean": 0.4}, groups)
    """

    def __init__(
        self,
        config: LoggingConfig,
        folder: RunFolder,
        *,
        steps: int,
        resolved: Mapping[str, Any] = MappingProxyType({}),
        saved_step: int = 0,
        success_at: float = 1.0,
        machine: str = "",
        gpus: int | None = None,
        telemetry: str | None = None,
        begins_with: Path | None = None,
    ) -> None:
        """`steps` is the number of steps of the run. `resolved` is its whole configuration, for the
        services that it is logged to. `saved_step` is the step of the checkpoint that the run
        continues. A trial whose reward is at least `success_at` is a success. `machine` says for
        readers what the run uses, and `gpus` how many GPUs. `telemetry`: where OpenTelemetry's
        spans and metrics are sent; None: nowhere. `begins_with`: the checkpoint that a
        deterministic run begins with, in its ledger; None: the run has no ledger."""
        self.folder = folder
        self.saved_step = saved_step
        self._success_at = success_at
        self._own = config.metrics
        self.summary: dict[str, Any] = folder.read_summary()
        self._config = dict(flat_config(resolved))
        self._record = RunRecord(folder.path, success_at)
        self._unlogged: dict[str, tuple[str, Rollout]] = {}
        """Failed trials by their ids, with the phase in which they ended."""
        self._phase = ""
        tracked: dict[str, str] = self.summary.setdefault("tracking", {})
        self.summary.setdefault("warnings", {})
        sinks = _sinks(config, folder, saved_step + 1, tracked, dict(resolved))
        self._trials = folder.trials_log.open("a", buffering=1, encoding="utf-8")
        self._telemetry: SeesRun | None = None
        if telemetry is not None:
            sending = load_extra("trainer.extras.telemetry:run_telemetry")
            self._telemetry = sending(telemetry, folder.path.name, resolved)
        ended = (lambda _: None) if self._telemetry is None else self._telemetry.phase
        self._phases = PhaseLog(folder.phases, ended)
        self._now = NowFile(folder.now)
        self._started = time.monotonic()
        self.progress = Progress(config.progress, steps, self._warned)
        self._metrics = MetricsLog(sinks, self.progress.say)
        self._tokens: TokenLog | None = None
        remove_steps_after(saved_step, folder.tokens)
        if config.token_bytes:
            self._tokens = TokenLog(folder.tokens, config.token_bytes, self.progress.say)
        self._ledger: WritesLedger | None = None
        if begins_with is not None:
            self._ledger = load_extra("trainer.extras.ledger.ledger:Ledger")(folder, begins_with)
        self._wall_before_s = float(self.summary.get("wall_s", 0.0))
        for of_the_past in ("error", "verdict"):  # of the process whose run this one continues
            self.summary.pop(of_the_past, None)
        if made := self.evaluations:  # those of steps that are repeated are, too
            kept = {name: each for name, each in made.items() if each["step"] <= saved_step}
            self.summary["eval"] = kept
        self._summarise(status="running", pid=os.getpid(), machine=machine, gpus=gpus)

    @property
    def wall_s(self) -> float:
        """Seconds that the run has taken, including the time before it was resumed."""
        return self._wall_before_s + time.monotonic() - self._started

    @property
    def keeps_tokens(self) -> bool:
        """Whether `step` writes the tokens that it is given."""
        return self._tokens is not None

    @property
    def keeps_evidence(self) -> bool:
        """Whether `step` writes the evidence that it is given."""
        return self._ledger is not None

    @property
    def evaluations(self) -> dict[str, Any]:
        """The evaluations made so far, by name."""
        made: dict[str, Any] = self.summary.get("eval", {})
        return made

    def phase(self, step: int, name: str, trials: int = 0) -> None:
        """The trainer begins a phase, of which the progress line shows the number of `trials`; 0 if
        it is not known. It ends with the next phase, step or evaluation."""
        self._phase = name
        self._phases.begin(step, name)
        self._now.begin(step, name, trials)
        self.progress.phase(step, name, trials)

    def follow(self, producer: Producer) -> None:
        """Shows how far the producer's next batch is, if it reports that."""
        if isinstance(producer, ReportsProduction):
            self._now.production = lambda: producer.production
        if self._ledger is not None and isinstance(producer, Judges):
            producer.intake.left_out = self._ledger.left_out

    def step(
        self,
        step: int,
        metrics: Mapping[str, float],
        groups: Sequence[Group],
        tokens: TokenColumns | None = None,
        evidence: Any = None,
    ) -> None:
        """`evidence`: what a deterministic step did (`trainer.extras.ledger`)."""
        self._phases.end()
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        metrics = {**metrics, **own_metrics(self._own, rollouts, metrics)}
        for group in groups:
            self._log_trials(step, "train", group.rollouts, group=group.group_id)
        if tokens is not None and self._tokens is not None:
            self._tokens.write(step, tokens)
        if self._ledger is not None:
            self._ledger.write(step, groups, evidence)
        self._metrics.log(step, metrics)
        if self._telemetry is not None:
            self._telemetry.step(step, metrics, groups)
        self.progress.step(step, metrics)
        self._summarise(steps=step)
        self._judge()

    def trial_ended(self, rollout: Rollout) -> None:
        """Shows in the progress line that a trial has ended."""
        if self._telemetry is not None:
            self._telemetry.trial_ended(rollout)
        self._now.trial(rollout)
        if rollout.status is RolloutStatus.FAILED and len(self._unlogged) < UNLOGGED:
            self._unlogged[rollout.trial_id] = self._phase, rollout
        success = rollout.reward is not None and rollout.reward >= self._success_at
        self.progress.trial(success=success, tokens=int(rollout.metrics.get("sampled_tokens", 0)))

    def evaluation(self, step: int, name: str, report: EvalReport) -> None:
        """`name` is `before`, `after`, or the step of a scheduled evaluation."""
        self._phases.end()
        overall = report.overall
        scores = {"eval/success": overall.success, "eval/reward": overall.mean_reward}
        scores |= {f"eval/pass_at_{k}": share for k, share in overall.pass_at_k.items() if k > 1}
        for agent, score in report.per_agent.items():
            scores[f"eval/agent/{agent}/success"] = score.success
            scores[f"eval/agent/{agent}/reward"] = score.mean_reward
        taken = [name.removeprefix("eval/") for name in scores]
        own = own_metrics(self._own, report.rollouts, taken)
        own_scores = {f"eval/{name}": value for name, value in own.items()}
        self._metrics.log(step, scores | own_scores)
        if self._telemetry is not None:
            self._telemetry.metrics(scores)
        self._log_trials(step, "eval", report.rollouts, evaluation=name)
        success = f"{percent(overall.success)} (95 % interval {interval(overall.interval)})"
        self.progress.say(
            f"evaluation {name}: success {success if overall.rollouts else 'unknown'}, "
            f"{overall.rollouts} trials of {overall.tasks} tasks, {overall.failed} failed"
        )
        earlier = {other: each for other, each in self.evaluations.items() if other != name}
        self._summarise(eval=earlier | {name: evaluation_summary(step, report)})
        self._judge()

    def report(self, page: Path, transcripts: Sequence[Transcript]) -> None:
        """Gives the services the report of the run, which has ended. A service that does not take
        it is a warning: the report is in the run's folder."""
        self._metrics.report(page, transcripts)

    def complete_ledger(self) -> None:
        """Returns when the ledger has every step so far, as before a checkpoint is written."""
        if self._ledger is not None:
            self._ledger.finish()

    def finish(self, status: str, **values: Any) -> None:
        """`status` is `done`, `stopped` or `failed`. May be called again when the processes around
        the run have ended."""
        self._phases.end()
        self._now.close()
        kinds = {True: "eval", False: "train"}
        for phase, rollout in list(self._unlogged.values()):
            kind = kinds[phase.startswith("evaluation")]
            name = {"evaluation": phase.removeprefix("evaluation ")} if kind == "eval" else {}
            step = int(self.summary.get("steps", 0)) + (kind == "train")
            self._log_trials(step, kind, [rollout], **name)
        self._summarise(status=status, **values)
        self._judge(say=False)  # the end of the run says all of it

    @property
    def verdict(self) -> VerdictJson | None:
        """How the run is doing; None before its first step or evaluation has ended."""
        found: VerdictJson | None = self.summary.get("verdict")
        return found

    def _judge(self, *, say: bool = True) -> None:
        """Decides how the run is doing from its folder, and says it if that has changed."""
        before = None if self.verdict is None else self.verdict["verdict"]
        verdict: VerdictJson | None = None
        with errors_as_warnings("the run's verdict could not be decided", self.progress.say):
            evidence = self._record.read()
            verdict = RunVerdict(self.folder.path, evidence, self.summary, self._config).json()
        if verdict is None:
            return
        self._summarise(verdict=verdict)
        if say and verdict["verdict"] not in (before, Word.TOO_EARLY):
            self.progress.say(f"verdict: {verdict['verdict']}. {verdict['sentence']}")

    def close(self) -> None:
        """Closes all parts, also if one of them fails; a service that fails is a warning."""
        with ExitStack() as last_first:
            if self._telemetry is not None:
                last_first.callback(self._telemetry.close)
            last_first.callback(self._now.close)
            last_first.callback(self._phases.close)
            last_first.callback(self._trials.close)
            last_first.callback(self._metrics.close)
            last_first.callback(self.progress.close)
            if self._ledger is not None:
                last_first.callback(self._ledger.close)
            if self._tokens is not None:
                last_first.callback(self._tokens.close)

    def _warned(self, text: str) -> None:
        """Counts a warning; the next line of the summary has it. Any thread may warn."""
        said: dict[str, int] = self.summary["warnings"]
        text = without_secrets(text)[:WARNING_CHARS]
        if text not in said and len(said) >= WARNINGS:
            text = "other warnings"
        self.summary["warnings"] = said | {text: said.get(text, 0) + 1}

    def _summarise(self, **values: Any) -> None:
        self.summary |= values | {"wall_s": round(self.wall_s, 1)}
        self.folder.write_summary(self.summary)

    def _log_trials(self, step: int, kind: str, rollouts: Iterable[Rollout], **more: str) -> None:
        for rollout in rollouts:
            self._unlogged.pop(rollout.trial_id, None)
            line = {
                "step": step,
                "kind": kind,
                **more,
                "trial_id": rollout.trial_id,
                "task_id": rollout.task.task_id,
                "source": rollout.task.source,
                **({"agent": rollout.task.agent} if rollout.task.agent else {}),
                "status": rollout.status.value,
                "reward": rollout.reward,
                "turns": rollout.num_turns,
                "sampled_tokens": int(rollout.metrics.get("sampled_tokens", 0)),
                "seconds": round(rollout.times_s.get("total", 0.0), 3),
                "started_at": round(rollout.started_at, 6),
                "times_s": {
                    name: round(rollout.times_s[name], 6)
                    for name in _TIMES
                    if name in rollout.times_s
                },
                "error": without_secrets(rollout.error),
            }
            self._trials.write(line_of(line))


_TIMES = ("opening", "agent", "verifier")
"""The phases of a trial whose times are logged in addition to its total."""


def evaluation_summary(step: int, report: EvalReport) -> dict[str, Any]:
    """What `summary.json` has of an evaluation."""
    values = {"step": step} | report.as_dict()
    values["reward"] = values.pop("mean_reward")
    values["trials"] = values.pop("rollouts")
    rewards: dict[tuple[str, ...], list[float]] = {}
    for rollout in report.rollouts:
        if is_judged(rollout) and rollout.reward is not None:
            task = rollout.task
            key = task.agent, task.source, task.task_id
            rewards.setdefault(key, []).append(rollout.reward)
    if len(rewards) > 1:
        # Over tasks, because rollouts of one task are not independent.
        values["reward_interval"] = bootstrap_interval([fmean(each) for each in rewards.values()])
    return values


def failure_of(error: BaseException | None) -> dict[str, str]:
    """Why a run failed, for its summary."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if error is None:
        return {}
    return {"error": without_credentials(f"{type(error).__name__}: {error}")[:1000]}


def _sinks(
    config: LoggingConfig,
    folder: RunFolder,
    first_step: int,
    tracked: dict[str, str],
    resolved: dict[str, Any],
) -> list[Sink]:
    """The places to log to. `tracked` holds the run's ids at the services; new ids are added."""
    name, shown = folder.path.name, without_secrets(resolved)
    sinks: list[Sink] = [JsonlSink(folder.metrics)]
    if config.tensorboard:
        sinks.append(TensorBoardSink(folder.tensorboard, purge_step=first_step))
    if project := config.wandb_project:
        wandb = WandbSink(project, name, shown, tracked.get("wandb"))
        tracked["wandb"] = wandb.run_id
        sinks.append(wandb)
    if experiment := config.mlflow_experiment:
        mlflow = MlflowSink(experiment, name, shown, tracked.get("mlflow"))
        tracked["mlflow"] = mlflow.run_id
        sinks.append(mlflow)
    return sinks
