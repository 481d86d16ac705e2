"""Many small calls (1 KB, 200 tokens back) through each target: requests/s, added latency, CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from operator import truediv
from statistics import median, quantiles

from benchmarks.proxy.targets import Target

_MESSAGES = [
    {"role": "system", "content": "You are an agent that works in a shell. " * 12},
    {"role": "user", "content": "Task @N@: list the files, then say which is the largest. " * 8},
]
BODY = json.dumps({"model": "fake", "messages": _MESSAGES, "max_tokens": 200})


@dataclass(frozen=True, slots=True)
class Cell:
    """One target at one number of clients."""

    target: str
    clients: int
    requests_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_ms_per_request: float
    failures: int


def measure(target: Target, clients: int, seconds: float) -> Cell:
    run_load(target.url, target.headers, clients, min(2.0, seconds))  # warm
    before = target.cpu_s()
    result = run_load(target.url, target.headers, clients, seconds)
    cpu_s = target.cpu_s() - before
    return Cell(
        target.name,
        clients,
        result["requests_per_s"],
        result["p50_ms"],
        result["p99_ms"],
        cpu_s * 1e3 / max(result["requests"], 1),
        int(result["failures"]),
    )


def run_load(url: str, headers: dict[str, str], clients: int, seconds: float) -> dict[str, float]:
    argv = [sys.executable, "-m", "benchmarks.proxy.load", url, "--headers", json.dumps(headers)]
    argv += ["--body", BODY, "--clients", str(clients), "--seconds", str(seconds)]
    done = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True, encoding="utf-8")
    result: dict[str, float] = json.loads(done.stdout)
    return result


TURN_S = 1.5
"""Seconds of a target in a round."""
RATIOS = "| target | CPU ms/request | over the first | quartiles |\n|---|---|---|---|"
HEADER = (
    "| target | clients | requests/s | added p50 ms | added p99 ms | CPU ms/request | failed |\n"
    "|---|---|---|---|---|---|---|"
)


def direct_row(clients: int, d: dict[str, float]) -> str:
    return (
        f"| direct | {clients} | {d['requests_per_s']:,.0f} | ({d['p50_ms']:.2f} absolute) "
        f"| ({d['p99_ms']:.2f} absolute) | | {d['failures']:.0f} |"
    )


def row(c: Cell, d: dict[str, float]) -> str:
    """The latency that the target adds to direct calls of the same number of clients."""
    return (
        f"| {c.target} | {c.clients} | {c.requests_per_s:,.0f} | {c.p50_ms - d['p50_ms']:.2f} "
        f"| {c.p99_ms - d['p99_ms']:.2f} | {c.cpu_ms_per_request:.3f} | {c.failures} |"
    )


def in_turns(running: list[Target], clients: int, rounds: int) -> Iterator[str]:
    """Rows of the processor time per request over that of the first target. All are measured in
    each round, because the speed of a machine changes within a run; the medians of the rounds."""
    spent: list[list[float]] = [[] for _ in running]
    for _ in range(rounds + 1):
        for cpu_ms, target in zip(spent, running, strict=True):
            cpu_ms.append(measure(target, clients, TURN_S).cpu_ms_per_request)
    for cpu_ms, target in zip(spent, running, strict=True):
        own, first = cpu_ms[1:], spent[0][1:]  # without the first round, which warms up
        low, middle, high = quantiles(map(truediv, own, first), n=4)
        yield f"| {target.name} | {median(own):.3f} | {middle:.2f} | {low:.2f} to {high:.2f} |"
