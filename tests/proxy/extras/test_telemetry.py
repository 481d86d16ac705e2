"""Spans and metrics of a real proxy, as a collector gets them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import proxy.extras.telemetry.spans as module
from proxy.errors import ConfigurationError
from proxy.extras.telemetry.spans import Telemetry, TelemetryConfig, TimedSpan, trial_context
from tests.proxy.conftest import StartProxy
from tests.proxy.extras.view.recording import SYSTEM, TOOL, user, work
from tests.proxy.otlp_receiver import Receiver, attributes_of, receiver

CLIENT = 3
"""OpenTelemetry's number of the kind of span."""


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Spans and metrics are sent at once. What still sends when a test ends is waited for: its
    repetitions draw from `random`, which Hypothesis refuses while it makes the data of a test."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "100")
    yield
    _until_closed()


def _until_closed() -> None:
    for thread in threading.enumerate():
        if thread.name == module.CLOSING:
            thread.join()


@pytest.fixture
async def collector() -> AsyncIterator[Receiver]:
    """Named before `start_proxy`, so that it ends after the proxy."""
    async with receiver() as running:
        yield running


async def test_each_call_and_each_tool_is_a_span_in_the_trace_of_its_session(
    collector: Receiver, start_proxy: StartProxy
) -> None:
    proxy = await start_proxy(telemetry={"endpoint": collector.url}, served_model_name="policy")
    session = await proxy.session(trial_id="fix-1", sampling={"temperature": 0.5, "seed": 7})
    await work(proxy, session, "Correct the sum.", turns=3)
    _, turns = await proxy.record(session)
    await collector.until(lambda: len(collector.spans) == 5)
    calls, tools = collector.named("chat m"), collector.named("execute_tool shell")
    assert [len(calls), len(tools)] == [3, 2]
    context = trial_context("fix-1")
    for span in (*calls, *tools):
        assert int.from_bytes(span.trace_id) == context.trace_id
        assert span.parent == b""
        assert span.service == "agentic-proxy"
        assert not span.failed
    for span, turn in zip(calls, turns, strict=True):
        assert span.kind == CLIENT
        assert span.start_s == pytest.approx(turn.started_at)
        assert span.end_s - span.start_s == pytest.approx(turn.duration_s, abs=1e-6)
        assert (
            span.attributes.items()
            >= {
                "gen_ai.operation.name": "chat",
                "gen_ai.provider.name": "vllm",
                "gen_ai.conversation.id": "fix-1",
                "gen_ai.request.model": "m",
                "gen_ai.request.temperature": 0.5,
                "gen_ai.request.seed": turn.sampling["seed"],
                "gen_ai.response.model": "policy",
                "gen_ai.response.id": f"fix-1#{turn.index}",
                "gen_ai.usage.input_tokens": turn.prompt_tokens,
                "gen_ai.usage.cache_read.input_tokens": turn.shared_tokens,
                "gen_ai.usage.output_tokens": len(turn.sampled_ids),
                "agentic.turn": turn.index,
                "agentic.engine": turn.engine,
            }.items()
        )
        assert span.attributes["gen_ai.response.finish_reasons"] == ["tool_calls"]
    for span, before, after in zip(tools, turns, turns[1:], strict=False):
        assert span.start_s == pytest.approx(before.started_at + (before.duration_s or 0.0))
        assert span.end_s == pytest.approx(after.started_at)
        assert span.attributes["gen_ai.tool.name"] == "shell"
        assert span.attributes["gen_ai.tool.call.id"]


async def test_metrics_count_calls_and_tokens(collector: Receiver, start_proxy: StartProxy) -> None:
    proxy = await start_proxy(telemetry={"endpoint": collector.url}, served_model_name="policy")
    session = await proxy.session()
    await work(proxy, session, "Correct the sum.", turns=2)
    _, turns = await proxy.record(session)

    def points(name: str) -> int:
        return sum(point.count for point in collector.metrics.get(name, ()))

    await collector.until(lambda: points("gen_ai.client.token.usage") == 4)
    assert points("gen_ai.client.operation.duration") == 2
    assert points("gen_ai.server.time_to_first_token") == 2
    by_type = {
        attributes_of(point)["gen_ai.token.type"]: point
        for point in collector.metrics["gen_ai.client.token.usage"]
    }
    assert by_type["input"].sum == sum(turn.prompt_tokens for turn in turns)
    assert by_type["output"].sum == sum(len(turn.sampled_ids) for turn in turns)
    # An agent chooses the model's name, so that it is not an attribute of metrics.
    assert attributes_of(by_type["input"])["gen_ai.request.model"] == "policy"


@pytest.mark.parametrize("exporter", ["otlp", "none"])
async def test_metrics_are_not_sent_to_a_collector_of_traces(
    exporter: str, collector: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", exporter)
    telemetry = Telemetry(collector.url, "test", {})
    telemetry.meter.create_counter("calls").add(1)
    telemetry.send(TimedSpan("call", 1.78e9, 1.78e9 + 1, {}))
    await asyncio.to_thread(telemetry.close)
    assert [span.name for span in collector.spans] == ["call"]
    assert ("calls" in collector.metrics) == (exporter == "otlp")


async def test_call_that_was_cut_is_an_error(collector: Receiver, start_proxy: StartProxy) -> None:
    limits = {"engine_patience_s": 0.0}
    proxy = await start_proxy(telemetry={"endpoint": collector.url}, limits=limits)
    session = await proxy.session()
    proxy.engine.script = lambda _: (_ for _ in ()).throw(RuntimeError("gone"))
    body = {"model": "m", "messages": [{"role": "system", "content": SYSTEM}, user("Hello.")]}
    status, _ = await proxy.post(session, "chat/completions", body)
    assert status >= 500
    await collector.until(lambda: collector.spans)
    (span,) = collector.spans
    assert span.failed
    assert span.attributes["error.type"] == "cut"


async def test_hostile_names_are_sent_as_text_or_shortened(
    collector: Receiver, start_proxy: StartProxy
) -> None:
    proxy = await start_proxy(telemetry={"endpoint": collector.url})
    session = await proxy.session()
    names = ["m" * 5000, "a\nb\x00\x1b[31m"]
    for name in names:
        body = {"model": name, "messages": [user(f"Hello, {name[:2]}.")], "tools": [TOOL]}
        status, _ = await proxy.post(session, "chat/completions", body)
        assert status == 200
    await collector.until(lambda: len(collector.spans) == 2)
    sent = [span.attributes["gen_ai.request.model"] for span in collector.spans]
    assert sent == ["m" * module.MAX_CHARS, names[1]]
    assert module.plain_text("\ud800x") == "?x"


@pytest.mark.parametrize(
    ("hostile", "sent"),
    [
        ({"task": "\ud800x"}, {"task": "?x"}),
        ({"own/\udcff": 0.5}, {"own/?": 0.5}),
        ({"seed": 2**70}, {}),
        ({"text": "x" * 10_000_000}, {"text": "x" * module.MAX_CHARS}),
        ({"x" * 10_000_000: 1}, {"x" * module.MAX_CHARS: 1}),
    ],
    ids=["surrogate", "name", "large integer", "long text", "long name"],
)
async def test_attribute_that_cannot_be_sent_loses_no_other_span(
    collector: Receiver, hostile: dict[str, object], sent: dict[str, object]
) -> None:
    telemetry = Telemetry(collector.url, "test", {"model": "\udcff" + "m" * 10_000_000})
    for attributes in ({"good": 1}, hostile):
        telemetry.send(TimedSpan("a\ud800", 1.78e9, 1.78e9 + 1, attributes, "b\ud800"))
    await asyncio.to_thread(telemetry.close)
    assert [span.attributes for span in collector.spans] == [{"good": 1}, sent]
    assert {span.name for span in collector.spans} == {"a?"}
    assert collector.spans[0].resource["model"] == "?" + "m" * (module.MAX_CHARS - 1)


async def test_collector_that_never_answers_delays_neither_calls_nor_the_stop(
    collector: Receiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "CLOSE_S", 0.2)
    monkeypatch.setattr(module, "SEND_S", 1000.0)
    monkeypatch.setattr(module, "QUEUE_SPANS", 600)
    collector.open.clear()
    telemetry = Telemetry(collector.url, "test", {})
    for number in range(2000):
        telemetry.send(TimedSpan(f"span {number}", 1.78e9, 1.78e9 + 1, {}))
    await collector.until(lambda: collector.requests)
    assert collector.spans == []
    # Without the bound of `close`, this would wait for a request that never ends.
    async with asyncio.timeout(100):
        await asyncio.to_thread(telemetry.close)
    assert collector.spans == []
    assert "Queue full" in caplog.text
    collector.open.set()
    await asyncio.to_thread(_until_closed)


async def test_calls_are_answered_while_the_collector_is_away(
    start_proxy: StartProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLOSE_S", 0.2)
    monkeypatch.setattr(module, "SEND_S", 0.2)
    async with receiver() as gone:
        url = gone.url
    proxy = await start_proxy(telemetry={"endpoint": url})
    session = await proxy.session()
    await work(proxy, session, "Correct the sum.", turns=3)
    _, turns = await proxy.record(session)
    assert len(turns) == 3


async def test_missing_package_is_named_at_the_start(
    start_proxy: StartProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigurationError, match=r"telemetry\.endpoint .* pip install"):
        await start_proxy(telemetry={"endpoint": "http://127.0.0.1:4318"})


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4318", "grpc://collector:4317"])
def test_endpoint_that_is_not_http_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match="String should match pattern"):
        TelemetryConfig(endpoint=endpoint)


def test_nothing_of_opentelemetry_is_imported_unless_it_is_configured(tmp_path: Path) -> None:
    code = (
        "import sys, proxy.extras.telemetry.spans\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "[]"
