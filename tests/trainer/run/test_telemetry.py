"""A run's trials, verifiers and steps, as a collector gets them from the trainer and its proxy."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import pytest

from proxy.extras.telemetry.spans import Telemetry, trial_context
from tests.proxy.conftest import StartProxy, checkpoint, rendering, start_proxy  # noqa: F401
from tests.proxy.extras.test_telemetry import collector  # noqa: F401
from tests.proxy.otlp_receiver import Receiver, attributes_of
from tests.trainer.view.recorded_run import begin, training
from trainer.extras.telemetry import RunTelemetry
from trainer.run.phases import EndedPhase


async def test_steps_trials_verifiers_and_calls_are_spans_that_refer_to_each_other(
    collector: Receiver,  # noqa: F811
    start_proxy: StartProxy,  # noqa: F811
    checkpoint: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "100")
    folder = begin(tmp_path / "run", checkpoint)
    _, run = await training(start_proxy, folder, "lamps", collector=collector.url)
    await run.evaluate("before")
    await run.step(**{"sync/bytes": 4096.0, "actor/policy_loss": 0.25})
    await collector.until(lambda: len(collector.named("chat ")) == 8)  # four trials
    await collector.until(
        lambda: collector.named("rl.sync") and collector.metrics.get("rl.train.loss")
    )
    await asyncio.to_thread(run.log.close)
    (loop,) = collector.named("rl.loop")
    assert loop.parent == b""
    assert loop.attributes["rl.loop.iteration"] == 1
    assert loop.attributes["rl.train.batch_size"] == 4  # one of them failed
    assert loop.attributes["agentic.sync.bytes"] == 4096.0
    assert loop.resource["rl.system"] == "agentic-rl"
    assert loop.resource["rl.run.id"] == "run"
    phases = [collector.named(name)[0] for name in ("rl.sample", "rl.train", "rl.sync")]
    assert {phase.parent for phase in phases} == {loop.span_id}
    assert {phase.trace_id for phase in phases} == {loop.trace_id}
    for before, after in pairwise(phases):
        assert before.end_s <= after.start_s + 1e-5
    assert phases[2].attributes["rl.sync.bytes"] == 4096
    (evaluation,) = collector.named("evaluation before")
    assert evaluation.end_s <= loop.start_s + 1e-5
    trials = collector.named("invoke_agent")
    assert len(trials) == 3
    for trial in trials:
        name = trial.attributes["gen_ai.conversation.id"]
        context = trial_context(name)
        assert int.from_bytes(trial.trace_id) == context.trace_id
        assert int.from_bytes(trial.span_id) == context.span_id
        assert trial.span_id in loop.links
        assert trial.attributes["rl.environment.name"] == "shop"
        assert trial.attributes["agentic.trial.status"] == "done"
        children = [span for span in collector.spans if span.parent == trial.span_id]
        assert sorted(span.name for span in children) == ["chat m", "chat m", "rl.reward"]
        assert {span.trace_id for span in children} == {trial.trace_id}
        (reward,) = [span for span in children if span.name == "rl.reward"]
        score = reward.attributes["gen_ai.evaluation.score.value"]
        assert score == trial.attributes["agentic.trial.reward"]
        assert reward.end_s == pytest.approx(trial.end_s)
    losses = {
        attributes_of(point)["rl.loss.type"]: point.as_double
        for point in collector.metrics["rl.train.loss"]
    }
    assert losses["policy"] == 0.25
    (steps,) = collector.metrics["rl.train.steps"]
    assert steps.as_int == 1
    (episodes,) = collector.metrics["rl.sample.episodes"]
    assert episodes.as_int == 3
    for name in ("rl.loop", "rl.sample", "rl.train", "rl.sync", "rl.reward"):
        assert collector.metrics[f"{name}.duration"], name


@pytest.mark.parametrize(("limit", "metrics"), [(None, 300), ("8", 6)])
async def test_step_is_sent_with_its_number_and_all_its_metrics_within_a_limit_that_is_set(
    collector: Receiver,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    limit: str | None,
    metrics: int,
) -> None:
    if limit is not None:
        monkeypatch.setenv("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", limit)
    telemetry = RunTelemetry(Telemetry(collector.url, "agentic-train", {}))
    telemetry.phase(EndedPhase(3, "training", 1.78e9, 2.5))
    telemetry.step(3, {f"own/{n}": n / 4 for n in range(300)}, [])
    await asyncio.to_thread(telemetry.close)
    await collector.until(lambda: collector.named("rl.loop"))
    (loop,) = collector.named("rl.loop")
    assert loop.attributes == {
        "rl.loop.iteration": 3,
        "rl.train.batch_size": 0,
        **{f"agentic.own.{n}": n / 4 for n in range(300 - metrics, 300)},
    }


async def test_phases_outside_a_step_that_ended_are_spans_of_their_own(
    collector: Receiver,  # noqa: F811
) -> None:
    """The engines' first weights, and the sampling of a step in which the run is stopped."""
    telemetry = RunTelemetry(Telemetry(collector.url, "agentic-train", {}))
    telemetry.phase(EndedPhase(0, "sending weights", 1.78e9, 18.0))
    telemetry.phase(EndedPhase(1, "sampling", 1.78e9 + 20, 2.0))
    telemetry.step(1, {}, [])
    telemetry.phase(EndedPhase(2, "sampling", 1.78e9 + 30, 4.0))
    await asyncio.to_thread(telemetry.close)
    await collector.until(lambda: len(collector.spans) == 4)
    (loop,) = collector.named("rl.loop")
    sampled = {span.end_s - span.start_s: span.parent for span in collector.named("rl.sample")}
    assert sampled == {2.0: loop.span_id, 4.0: b""}
    (first,) = collector.named("rl.sync")
    assert first.parent == b""
    assert first.attributes == {"rl.loop.iteration": 0}
    assert first.end_s - first.start_s == 18.0
