"""A Phoenix in a process of its own, which receives spans."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from proxy.machine.port import free_port

PROGRAM = Path(__file__).parents[2] / ".cache/phoenix/bin/phoenix"
MISSING = None if PROGRAM.exists() else "run python -m benchmarks.install phoenix"
START_S = 240.0
"""It takes 15 s on a free core."""
WAIT_S = 120.0
"""For spans that it was sent, which it stores later."""
Spans = list[dict[str, Any]]


class Phoenix:
    def __init__(self, url: str) -> None:
        self.url = url

    def spans(self, done: Callable[[Spans], bool]) -> Spans:
        """All of its spans, as soon as they fulfil the condition, or after `WAIT_S`."""
        end = time.monotonic() + WAIT_S
        while True:
            spans = self._spans()
            if done(spans) or time.monotonic() > end:
                return spans
            time.sleep(0.2)

    def _spans(self) -> Spans:
        spans: Spans = []
        cursor: str | None = None
        while True:
            query = {"limit": 1000} | ({} if cursor is None else {"cursor": cursor})
            answer = httpx.get(
                f"{self.url}/v1/projects/default/spans", params=query, timeout=WAIT_S
            )
            if answer.status_code == 404:  # the first span makes the project
                return []
            page = answer.raise_for_status().json()
            spans += page["data"]
            cursor = page["next_cursor"]
            if cursor is None:
                return spans


@contextmanager
def running(folder: Path) -> Iterator[Phoenix]:
    """A Phoenix with its files in a folder."""
    http, grpc = free_port("127.0.0.1"), free_port("127.0.0.1")
    settings = {
        "PHOENIX_WORKING_DIR": str(folder / "phoenix"),
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": str(http),
        "PHOENIX_GRPC_PORT": str(grpc),
        "PHOENIX_TELEMETRY_ENABLED": "false",
    }
    log = folder / "phoenix.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [PROGRAM, "serve"], env={**os.environ, **settings}, stdout=out, stderr=out
        )
    url = f"http://127.0.0.1:{http}"
    try:
        end = time.monotonic() + START_S
        while not _answers(f"{url}/healthz"):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.5)
        yield Phoenix(url)
    finally:
        process.terminate()
        process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=10).status_code == 200
    except httpx.TransportError:
        return False
