"""Many streams at once at a reader's pace: how much longer the gaps between tokens become."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import aiohttp
import orjson

from benchmarks.proxy.targets import Target


@dataclass(frozen=True, slots=True)
class Gaps:
    streams: int
    p50_ms: float
    p99_ms: float
    """Of the time between two reads of one stream."""
    cpu_share: float
    """Processor time of the target by wall time: 1.0 is one core."""


async def measure(url: str, body: bytes, streams: int, target: Target | None) -> Gaps:
    gaps: list[float] = []
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    cpu_s = target.cpu_s() if target else 0.0
    began = time.perf_counter()
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        await asyncio.gather(*(_read(http, _url(url, n), body, gaps) for n in range(streams)))
    wall_s = time.perf_counter() - began
    cpu_s = target.cpu_s() - cpu_s if target else 0.0
    gaps.sort()
    middle, high = gaps[len(gaps) // 2], gaps[int(len(gaps) * 0.99)]
    return Gaps(streams, middle * 1e3, high * 1e3, cpu_s / wall_s)


def chat_body() -> bytes:
    message = {"role": "user", "content": "Count to a thousand, slowly."}
    return orjson.dumps({"model": "fake", "messages": [message], "stream": True})


def generate_body() -> bytes:
    return orjson.dumps(
        {"request_id": "r", "token_ids": [1], "sampling_params": {}, "stream": True}
    )


def _url(url: str, number: int) -> str:
    return url.replace("/s@S@/", f"/stream-{number}/")


async def _read(http: aiohttp.ClientSession, url: str, body: bytes, gaps: list[float]) -> None:
    async with http.post(url, data=body) as response:
        if response.status != 200:
            raise SystemExit(f"{url}: {response.status} {await response.text()}")
        last = None
        async for _ in response.content.iter_any():
            now = time.perf_counter()
            if last is not None:
                gaps.append(now - last)
            last = now
