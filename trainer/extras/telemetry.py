"""A run as OpenTelemetry's spans and metrics, with the names that are proposed for `rl.*`.

    invoke_agent solver       a trial; its calls and tools, which the proxy sends, are parts of it
      rl.reward               the verifier
    rl.loop                   a step, with links to its trials
      rl.sample, rl.train, rl.sync
    rl.sync                   the engines' first weights, before the first step
    evaluation before, saving, …   the other phases of the trainer

Invariant: as `proxy.extras.telemetry.spans`: nothing here waits for the collector.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agent_loop.records import Group, Rollout, RolloutStatus
from proxy.extras.telemetry.spans import SECONDS, Telemetry, TimedSpan, plain_text, trial_context
from proxy.machine.secrecy import without_credentials
from trainer.run.phases import EndedPhase

if TYPE_CHECKING:
    from opentelemetry.trace import Link, SpanContext

PHASES = {"sampling": "rl.sample", "training": "rl.train", "sending weights": "rl.sync"}
"""The phases of a step, by their names in `phases.jsonl`."""
GAUGES: Mapping[str, tuple[str, dict[str, str]]] = {
    "actor/policy_loss": ("rl.train.loss", {"rl.loss.type": "policy"}),
    "critic/loss": ("rl.train.loss", {"rl.loss.type": "value"}),
    "kl/reference": ("rl.train.loss", {"rl.loss.type": "kl_divergence"}),
    "eval/reward": ("rl.environment.reward.mean", {}),
    "rollout/turns": ("rl.environment.episode.length.mean", {}),
}
"""Metrics of the run that have a proposed name, with their attributes."""
MAX_LINKS = 128
"""Links that a span keeps (OpenTelemetry's own default)."""


class RunTelemetry:
    """Sends what a `RunLog` gets.

    Example: RunTelemetry(Telemetry(endpoint, "agentic-train", run_attributes("a", config)))
    """

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._phases: list[EndedPhase] = []
        """Those of the step in progress."""
        meter = telemetry.meter
        self._durations = {
            name: telemetry.histogram(f"{name}.duration", "s", f"Duration of {name}", SECONDS)
            for name in ("rl.loop", "rl.reward", *PHASES.values())
        }
        self._counters = {
            name: meter.create_counter(name)
            for name in ("rl.sample.episodes", "rl.train.steps", "rl.train.tokens")
        }
        self._gauges = {name: meter.create_gauge(name) for name, _ in GAUGES.values()}

    def trial_ended(self, rollout: Rollout) -> None:
        """Sends the trial and its verifier."""
        times, trial = rollout.times_s, trial_context(rollout.trial_id)
        start = rollout.started_at or time.time() - times.get("total", 0.0)
        end = start + times.get("total", 0.0)
        agent = plain_text(rollout.task.agent or "agent")
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.agent.name": agent,
            "gen_ai.conversation.id": plain_text(rollout.trial_id),
            "rl.environment.name": plain_text(rollout.task.source),
            "agentic.task": plain_text(rollout.task.task_id),
            "agentic.trial.status": rollout.status.value,
            "agentic.trial.reward": rollout.reward,
            "agentic.trial.turns": rollout.num_turns,
            "gen_ai.usage.output_tokens": int(rollout.metrics.get("sampled_tokens", 0)),
        }
        failed = rollout.status in (RolloutStatus.FAILED, RolloutStatus.ABORTED)
        error = (
            plain_text(without_credentials(rollout.error or rollout.status.value))
            if failed
            else None
        )
        span = TimedSpan(f"invoke_agent {agent}", start, end, attributes, error)
        self._telemetry.send(span, context=trial)
        self._counters["rl.sample.episodes"].add(1)
        if "verifier" in times:
            judged = {
                "gen_ai.evaluation.name": "reward",
                "gen_ai.evaluation.score.value": rollout.reward,
            }
            reward = TimedSpan("rl.reward", end - times["verifier"], end, judged)
            self._telemetry.send(reward, parent=trial)
            self._durations["rl.reward"](times["verifier"], {})

    def phase(self, phase: EndedPhase) -> None:
        """A phase of the trainer has ended: those of a step are sent with it, others at once."""
        if phase.name in PHASES:
            self._phases.append(phase)
        else:
            self._send(phase)

    def step(self, step: int, metrics: Mapping[str, float], groups: Sequence[Group]) -> None:
        """Sends the step with its phases, which have ended."""
        phases = [phase for phase in self._phases if phase.step == step]
        self._send_other_phases(step)
        if not phases:
            return
        trials = [rollout.trial_id for group in groups for rollout in group.rollouts]
        start, end = phases[0].started_at, max(p.started_at + p.seconds for p in phases)
        attributes: dict[str, Any] = {  # a span with too many drops the first ones
            **{f"agentic.{name.replace('/', '.')}": value for name, value in metrics.items()},
            "rl.loop.iteration": step,
            "rl.train.batch_size": len(trials),
        }
        loop = self._telemetry.send(
            TimedSpan("rl.loop", start, end, attributes), links=_links(trials)
        )
        self._durations["rl.loop"](end - start, {})
        for phase in phases:
            sent = int(metrics.get("sync/bytes", 0)) if phase.name == "sending weights" else 0
            self._send(phase, loop, sent or None)
        self._counters["rl.train.steps"].add(1)
        self._counters["rl.train.tokens"].add(int(metrics.get("rollout/sampled_tokens", 0)))
        self.metrics(metrics)

    def metrics(self, metrics: Mapping[str, float]) -> None:
        """Sends the metrics that have a proposed name."""
        for metric, (name, attributes) in GAUGES.items():
            if metric in metrics:
                self._gauges[name].set(metrics[metric], attributes)

    def close(self) -> None:
        """Sends what is left, for a bounded time."""
        self._send_other_phases(None)
        self._telemetry.close()

    def _send_other_phases(self, step: int | None) -> None:
        """Sends the waiting phases that are not of this step, as no part of a step: the first
        weights of the engines, and those of a step that did not end."""
        for phase in self._phases:
            if phase.step != step:
                self._send(phase)
        self._phases = []

    def _send(
        self, phase: EndedPhase, step: SpanContext | None = None, sync_bytes: int | None = None
    ) -> None:
        """`step`: the span that it is part of."""
        name = PHASES.get(phase.name, phase.name)
        attributes = {"rl.loop.iteration": phase.step, "rl.sync.bytes": sync_bytes}
        end = phase.started_at + phase.seconds
        self._telemetry.send(TimedSpan(name, phase.started_at, end, attributes), parent=step)
        if name in self._durations:
            self._durations[name](phase.seconds, {})


def run_attributes(name: str, resolved: Mapping[str, Any]) -> dict[str, str]:
    """The attributes of a run's process, from its name and its configuration."""
    algorithm = resolved.get("algorithm", {}).get("preset")
    model = resolved.get("model", {}).get("path")
    named = {"rl.algorithm": algorithm, "rl.model.name": model}
    known = {key: str(value) for key, value in named.items() if value}
    return {"rl.system": "agentic-rl", "rl.run.id": name, **known}


def _links(trials: Sequence[str]) -> list[Link]:
    from opentelemetry.trace import Link

    return [Link(trial_context(trial)) for trial in trials[:MAX_LINKS]]


def run_telemetry(endpoint: str, name: str, resolved: Mapping[str, Any]) -> RunTelemetry:
    """Sends a run to the collector at `endpoint`. `name` and `resolved` are those of the run's
    folder and configuration."""
    return RunTelemetry(Telemetry(endpoint, "agentic-train", run_attributes(name, resolved)))
