"""A closed-loop load generator that costs little CPU: raw HTTP/1.1 on asyncio protocols.

Each client sends its next request when it has the whole answer to the last. As a separate process
(`python -m benchmarks.proxy.load`) it prints one JSON line: latencies in ms, requests/s.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import uvloop

CALLS_PER_SESSION = 100
PATIENCE_S = 30.0
"""A call that is not answered within this time after the end has failed."""


@dataclass(slots=True)
class Load:
    """Example: Load("http://127.0.0.1:8000/v1/chat/completions", {"Authorization": "Bearer k"},
    body, clients=32, seconds=5.0)"""

    url: str
    headers: dict[str, str]
    body: str
    """`@N@` in the body is replaced by a number that no other request has. `@S@` in the URL is
    replaced by a number that CALLS_PER_SESSION requests of a client share, as in a session."""
    clients: int
    seconds: float
    latencies_s: list[float] = field(default_factory=list)
    failures: int = 0
    sent: int = field(default_factory=lambda: time.time_ns() // 10**6 % 10**8)
    """Starts from another number in every run, so that no request is repeated."""
    ends_at: float = 0.0
    answered_at: float = 0.0

    async def run(self) -> dict[str, float]:
        address = urlsplit(self.url)
        loop = asyncio.get_running_loop()
        begun = time.perf_counter()
        self.ends_at = begun + self.seconds
        numbers = itertools.count()
        ended = [loop.create_future() for _ in range(self.clients)]
        for future in ended:
            await loop.create_connection(
                lambda future=future: _Client(self, future, f"{self.sent}-{next(numbers)}"),  # type: ignore[misc]
                address.hostname or "",
                address.port or 80,
            )
        _, unanswered = await asyncio.wait(ended, timeout=self.seconds + PATIENCE_S)
        self.failures += len(unanswered)
        return self._summary(self.answered_at - begun)

    def next_request(self, session: str) -> bytes:
        self.sent += 1
        body = self.body.replace("@N@", f"{self.sent:08d}").encode()
        address = urlsplit(self.url)
        path = address.path.replace("@S@", session)
        lines = [f"POST {path} HTTP/1.1", f"Host: {address.netloc}"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}", "", ""]
        return "\r\n".join(lines).encode() + body

    def _summary(self, wall_s: float) -> dict[str, float]:
        ordered = sorted(self.latencies_s) or [float("nan")]
        return {
            "requests": len(self.latencies_s),
            "requests_per_s": len(self.latencies_s) / max(wall_s, 1e-9),
            "p50_ms": ordered[len(ordered) // 2] * 1e3,
            "p99_ms": ordered[int(len(ordered) * 0.99)] * 1e3,
            "failures": self.failures,
        }


class _Client(asyncio.Protocol):
    def __init__(self, load: Load, ended: asyncio.Future[None], name: str) -> None:
        self._name = name
        self._calls = 0
        self._load = load
        self._ended = ended
        self._buffer = bytearray()
        self._wanted: int | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name
        self._send()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._wanted is None:
            self._read_head()
        if self._wanted is not None and len(self._buffer) >= self._wanted:
            self._answered()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._ended.done():
            self._load.failures += 1
            self._ended.set_result(None)

    def _send(self) -> None:
        self._buffer.clear()
        self._wanted = None
        request = self._load.next_request(f"{self._name}-{self._calls // CALLS_PER_SESSION}")
        self._calls += 1
        self._sent_at = time.perf_counter()
        self._transport.write(request)

    def _read_head(self) -> None:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._buffer[:end]).lower()
        self._ok = head.startswith(b"http/1.1 200")
        length = head.partition(b"content-length:")[2].partition(b"\r\n")[0]
        if not length:
            raise SystemExit(f"the target answers without Content-Length: {head!r}")
        self._wanted = end + 4 + int(length)

    def _answered(self) -> None:
        now = time.perf_counter()
        if self._ok:
            self._load.latencies_s.append(now - self._sent_at)
            self._load.answered_at = now
        else:
            self._load.failures += 1
            if self._load.failures == 1:
                print(bytes(self._buffer[:400]), file=sys.stderr)
        if now < self._load.ends_at:
            self._send()
        else:
            self._ended.set_result(None)
            self._transport.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.proxy.load", description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--headers", default="{}")
    parser.add_argument("--body", required=True)
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    arguments = parser.parse_args()
    load = Load(
        arguments.url,
        json.loads(arguments.headers),
        arguments.body,
        arguments.clients,
        arguments.seconds,
    )
    print(json.dumps(uvloop.run(load.run())))


if __name__ == "__main__":
    main()
