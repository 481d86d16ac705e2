"""Many concurrent streams at reading speed: how much longer the gaps between tokens become."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import orjson

from benchmarks.proxy.targets import Target

GENERATE = "/inference/v1/generate"
TOKENS_PER_S = 30.0
"""The speed of each stream."""
OPENED_OVER_S = 3.0
"""Streams start at different times within this period, as agents do."""


@dataclass(frozen=True, slots=True)
class Gaps:
    streams: int
    p50_ms: float
    p99_ms: float
    """Percentiles of the time between two reads of one stream."""
    cpu_share: float
    """CPU time of the target per wall time while all streams were open; 1.0 is one core."""
    cpu_us_per_token: float
    """CPU time of the target in this time, per token that the engine sent."""


async def measure(url: str, body: bytes, streams: int, target: Target | None) -> Gaps:
    gaps: list[float] = []
    tasks = []
    for number in range(streams):
        tasks.append(asyncio.create_task(_read(_url(url, number), body, gaps)))
        await asyncio.sleep(OPENED_OVER_S / streams)
    cpu_s, began = target.cpu_s() if target else 0.0, time.perf_counter()
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    cpu_s, wall_s = target.cpu_s() - cpu_s if target else 0.0, time.perf_counter() - began
    await asyncio.gather(*tasks)
    gaps.sort()
    middle, high = gaps[len(gaps) // 2], gaps[int(len(gaps) * 0.99)]
    per_token_us = cpu_s / (wall_s * streams * TOKENS_PER_S) * 1e6
    return Gaps(streams, middle * 1e3, high * 1e3, cpu_s / wall_s, per_token_us)


def chat_body() -> bytes:
    message = {"role": "user", "content": "Count to a thousand, slowly."}
    return orjson.dumps({"model": "fake", "messages": [message], "stream": True})


def generate_body() -> bytes:
    return orjson.dumps(
        {"request_id": "r", "token_ids": [1], "sampling_params": {}, "stream": True}
    )


def _url(url: str, number: int) -> str:
    return url.replace("/s@S@/", f"/stream-{number}/")


async def _read(url: str, body: bytes, gaps: list[float]) -> None:
    address = urlsplit(url)
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    head = f"POST {address.path} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Length: {len(body)}"
    transport, _ = await loop.create_connection(
        lambda: _Reader(f"{head}\r\n\r\n".encode() + body, gaps, ended),
        address.hostname or "",
        address.port or 80,
    )
    await ended
    transport.close()


class _Reader(asyncio.Protocol):
    """Records when data arrived, and does little else, to cost little CPU."""

    def __init__(self, request: bytes, gaps: list[float], ended: asyncio.Future[None]) -> None:
        self._request = request
        self._gaps = gaps
        self._ended = ended
        self._last = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._last:
            self._gaps.append(now - self._last)
        elif not data.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"the target answers {data[:400]!r}")
        self._last = now
        if b"[DONE]" in data and not self._ended.done():
            self._ended.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._ended.done():
            self._ended.set_exception(exc or ConnectionError("closed before the end"))
