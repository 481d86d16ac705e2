"""A collector of OpenTelemetry that decodes what it gets with the official protobuf classes."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from proxy.http.server import app_runner

WAIT_S = 60.0


@dataclass
class SentSpan:
    """A span as the collector got it."""

    name: str
    trace_id: bytes
    span_id: bytes
    parent: bytes
    kind: int
    start_s: float
    end_s: float
    attributes: dict[str, Any]
    failed: bool
    links: list[bytes]
    """The ids of the linked spans."""
    service: str
    resource: dict[str, Any]


@dataclass
class Receiver:
    """Requests wait at `open`; it is set from the start."""

    url: str = ""
    spans: list[SentSpan] = field(default_factory=list)
    metrics: dict[str, list[Any]] = field(default_factory=dict)
    """The data points of each metric that came last."""
    requests: int = 0
    """Number of requests, also of those that wait."""
    open: asyncio.Event = field(default_factory=asyncio.Event)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def until(self, there: Callable[[], object]) -> None:
        async with asyncio.timeout(WAIT_S), self._changed:
            await self._changed.wait_for(there)

    def named(self, prefix: str) -> list[SentSpan]:
        return [span for span in self.spans if span.name.startswith(prefix)]

    async def traces(self, request: web.Request) -> web.Response:
        sent = ExportTraceServiceRequest.FromString(await self._body(request))
        for resource in sent.resource_spans:
            about = _attributes(resource.resource.attributes)
            for scope in resource.scope_spans:
                assert scope.scope.name == "agentic_rl"
                self.spans += [_span(span, about) for span in scope.spans]
        await self._tell()
        return web.Response(
            body=ExportTraceServiceResponse().SerializeToString(),
            content_type="application/x-protobuf",
        )

    async def numbers(self, request: web.Request) -> web.Response:
        sent = ExportMetricsServiceRequest.FromString(await self._body(request))
        for resource in sent.resource_metrics:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    data = getattr(metric, metric.WhichOneof("data"))
                    self.metrics[metric.name] = list(data.data_points)
        await self._tell()
        return web.Response(
            body=ExportMetricsServiceResponse().SerializeToString(),
            content_type="application/x-protobuf",
        )

    async def _body(self, request: web.Request) -> bytes:
        body = await request.read()
        self.requests += 1
        await self._tell()
        await self.open.wait()
        return gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()


@asynccontextmanager
async def receiver() -> AsyncIterator[Receiver]:
    """A collector on loopback. Requests that wait when it ends are answered."""
    collector = Receiver()
    collector.open.set()
    app = web.Application()
    app.router.add_post("/v1/traces", collector.traces)
    app.router.add_post("/v1/metrics", collector.numbers)
    runner = app_runner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    collector.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield collector
    finally:
        collector.open.set()
        await runner.cleanup()


def attributes_of(point: Any) -> dict[str, Any]:
    """The attributes of a data point."""
    return _attributes(point.attributes)


def _span(span: Any, about: dict[str, Any]) -> SentSpan:
    return SentSpan(
        name=span.name,
        trace_id=span.trace_id,
        span_id=span.span_id,
        parent=span.parent_span_id,
        kind=span.kind,
        start_s=span.start_time_unix_nano / 1e9,
        end_s=span.end_time_unix_nano / 1e9,
        attributes=_attributes(span.attributes),
        failed=span.status.code == 2,
        links=[link.span_id for link in span.links],
        service=about["service.name"],
        resource=about,
    )


def _attributes(given: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in given}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)
