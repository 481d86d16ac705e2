"""OpenTelemetry: spans and metrics, sent by OTLP over HTTP; names follow its GenAI conventions.

    chat policy               a call, from the request to its recorded answer
    execute_tool shell        from an answer with a tool call to the call that brings the result

A session is one trace, whose id follows from the session's id, so that the trainer's process can
add its spans to the trace of a trial (`trial_context`).

Invariant: recording a span or a number waits for nothing; the SDK sends them from threads of its
own, from a queue of `QUEUE_SPANS` spans that drops what does not fit. `close` takes at most
`CLOSE_S`. OpenTelemetry is imported when `Telemetry` is made, which happens only if a collector is
configured.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from pydantic import Field

from proxy.errors import ConfigurationError
from proxy.http.valid_json import valid_text
from proxy.settings.section import Section

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter
    from opentelemetry.trace import Link, SpanContext

CLOSE_S = 3.0
"""Longest time in which what is left is sent when the process stops."""
CLOSING = "telemetry-close"
"""The thread that may go on for a while after `close`."""
SEND_S = 5.0
"""Longest time of one request to the collector, with its repetitions."""
QUEUE_SPANS = 8192
"""About 10 MB; at 1,000 calls per second, the collector may be away for some seconds."""
METRICS_EVERY_MS = 10_000.0
"""How often metrics are sent, unless OTEL_METRIC_EXPORT_INTERVAL says otherwise."""
MAX_ATTRIBUTES = 1024
"""Attributes that a span keeps, unless a variable of OpenTelemetry says otherwise; more than the
metrics of a step. A span that gets more drops its first ones."""
MAX_CHARS = 200
"""Characters of a text that agents or models chose."""
SECONDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
"""Bounds of the histograms of durations, as the conventions give them."""
TOKENS = tuple(4**power for power in range(14))

Attributes = Mapping[str, Any]


class TelemetryConfig(Section):
    """OpenTelemetry: a span per model call and tool call, and metrics; in a run also per trial,
    verifier and step (docs/observe.md)."""

    endpoint: str | None = Field(default=None, pattern=r"^https?://")
    """The URL of a collector that accepts OTLP over HTTP, such as `http://127.0.0.1:4318`, without
    `/v1/traces`. Needs the extra `telemetry`. Its keys are in the environment variable
    OTEL_EXPORTER_OTLP_HEADERS. Default: nothing is sent."""


@dataclass(frozen=True, slots=True)
class TimedSpan:
    """A span that has ended. Times are in Unix seconds.

    Example: TimedSpan("rl.train", 1.78e9, 1.78e9 + 2.5, {"rl.loop.iteration": 3})
    """

    name: str
    start: float
    end: float
    attributes: Attributes
    error: str | None = None
    """Why it failed; None: it did not."""
    is_client: bool = False
    """Whether it is a request to another process."""


class Telemetry:
    """Example:
    telemetry = Telemetry("http://127.0.0.1:4318", "agentic-proxy", {})
    telemetry.send(TimedSpan("chat policy", began, ended, {}), parent=trial_context("sum-17-x"))
    telemetry.close()
    """

    def __init__(self, endpoint: str, service: str, about: Attributes) -> None:
        """`about` are attributes of the process.

        Raises:
            ConfigurationError: OpenTelemetry is not installed.
        """
        try:
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.metrics import MeterProvider
            from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import SpanLimits, TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigurationError(
                f"telemetry.endpoint is set, but {error.name} is not installed: pip install"
                " opentelemetry-sdk opentelemetry-exporter-otlp-proto-http (the extra"
                " `telemetry`), or remove the key"
            ) from error
        url = endpoint.rstrip("/")
        named = os.environ.get("OTEL_SERVICE_NAME", service)
        resource = Resource.create(_sendable({"service.name": named, **about}))
        self._ids = _ChosenIds()
        limited = {"OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "OTEL_ATTRIBUTE_COUNT_LIMIT"} & {*os.environ}
        self._tracing = TracerProvider(
            resource=resource,
            id_generator=self._ids.generator(),
            span_limits=SpanLimits(max_span_attributes=None if limited else MAX_ATTRIBUTES),
            shutdown_on_exit=False,
        )
        self._tracing.add_span_processor(
            BatchSpanProcessor(
                OTLPSpanExporter(f"{url}/v1/traces", timeout=SEND_S), max_queue_size=QUEUE_SPANS
            )
        )
        # Some collectors, such as Phoenix, accept traces alone.
        wanted = os.environ.get("OTEL_METRICS_EXPORTER") != "none"
        every_ms = None if "OTEL_METRIC_EXPORT_INTERVAL" in os.environ else METRICS_EVERY_MS
        exporter = OTLPMetricExporter(f"{url}/v1/metrics", timeout=SEND_S)
        readers = [PeriodicExportingMetricReader(exporter, every_ms)] if wanted else []
        self._metering = MeterProvider(readers, resource, shutdown_on_exit=False)
        release = version("agentic-rl")
        self._tracer = self._tracing.get_tracer("agentic_rl", release)
        self.meter: Meter = self._metering.get_meter("agentic_rl", release)

    def send(
        self,
        span: TimedSpan,
        *,
        parent: SpanContext | None = None,
        context: SpanContext | None = None,
        links: Sequence[Link] = (),
    ) -> SpanContext:
        """Queues the span and returns its context. `context`: the ids that a span without a parent
        gets; default: random ones."""
        from opentelemetry.trace import (
            NonRecordingSpan,
            SpanKind,
            Status,
            StatusCode,
            set_span_in_context,
        )

        self._ids.chosen = context
        sent = self._tracer.start_span(
            plain_text(span.name),
            None if parent is None else set_span_in_context(NonRecordingSpan(parent)),
            SpanKind.CLIENT if span.is_client else SpanKind.INTERNAL,
            _sendable(span.attributes),
            links,
            start_time=_ns(span.start),
        )
        if span.error is not None:
            sent.set_status(Status(StatusCode.ERROR, plain_text(span.error)))
        sent.end(_ns(max(span.start, span.end)))
        return sent.get_span_context()

    def histogram(self, name: str, unit: str, what: str, bounds: Sequence[float]) -> Record:
        """Records a number with attributes in a histogram."""
        made = self.meter.create_histogram(
            name, unit, what, explicit_bucket_boundaries_advisory=bounds
        )
        return lambda value, attributes: made.record(value, dict(attributes))

    def close(self) -> None:
        """Sends what is left, for at most `CLOSE_S`."""
        closing = threading.Thread(target=self._close, name=CLOSING, daemon=True)
        closing.start()
        closing.join(CLOSE_S)

    def _close(self) -> None:
        self._tracing.shutdown()
        self._metering.shutdown(timeout_millis=CLOSE_S * 1e3)


Record = Callable[[float, Attributes], None]


class _ChosenIds:
    """Gives the next span that has no parent the ids of `chosen`."""

    def __init__(self) -> None:
        self.chosen: SpanContext | None = None

    def generator(self) -> Any:
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

        outer = self

        class _Generator(RandomIdGenerator):
            def generate_trace_id(self) -> int:
                chosen = outer.chosen
                return super().generate_trace_id() if chosen is None else chosen.trace_id

            def generate_span_id(self) -> int:
                chosen, outer.chosen = outer.chosen, None
                return super().generate_span_id() if chosen is None else chosen.span_id

        return _Generator()


def trial_context(session_id: str) -> SpanContext:
    """The trace and the span of a trial, which follow from its id."""
    from opentelemetry.trace import SpanContext, TraceFlags

    digest = sha256(f"agentic-rl trial {session_id}".encode(errors="surrogatepass")).digest()
    trace_id, span_id = int.from_bytes(digest[:16]), int.from_bytes(digest[16:24])
    return SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(1))


def plain_text(value: str) -> str:
    """The text as it can be sent: lone surrogates have no UTF-8."""
    return valid_text(value[:MAX_CHARS])


def _sendable(attributes: Attributes) -> dict[str, Any]:
    """Attributes without what the exporter cannot send: one would lose the batch that it is in."""
    return {
        plain_text(name): plain_text(value) if isinstance(value, str) else value
        for name, value in attributes.items()
        if value is not None and not (isinstance(value, int) and value.bit_length() > 63)
    }


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
