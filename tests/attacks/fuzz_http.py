"""Hostile requests at every route of every server: proxy, relay, swarm and harbor-server.

    python -m tests.attacks.fuzz_http --requests 100000 --seed 7 --planes relay swarm

SIGINT (Ctrl-C) ends it early, with its report.

Bodies are mutated, compressed, truncated, or sent with a false length; so are control calls,
headers, framing and the frames of WebSockets. What must hold: no 500, no traceback in the log, the
server's health route answers all the time, every session's record can be read, and no turn stays
open.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.attacks.hostile import Attack, Call, Fuzzer
from tests.attacks.planes import PLANES
from tests.attacks.server import Hang, Server, patiently

PARALLEL = 16
REQUESTS_PER_RENEWAL = 2000
"""After this number of requests, the records are checked and the sessions replaced."""
SLOW_PIECES, SLOW_S = 10, 0.05
"""A slow client sends its request in this number of pieces, and waits after each."""
NEXT_S = 0.3
"""How long a client waits for an answer to one of several messages."""
HEALTH_S = 0.25


@dataclass(frozen=True, slots=True)
class Manner:
    """How a client behaves on its connection."""

    slow: bool = False
    reads: bool = True
    stays_s: float = 0.0
    """How long a client that does not read its answer keeps the connection."""


MANNERS = (Manner(), Manner(slow=True), Manner(reads=False), Manner(reads=False, stays_s=1.0))
MANNER_WEIGHTS = (93, 2, 3, 2)


@dataclass(slots=True)
class Report:
    plane: str
    seed: int
    answers: Counter[int] = field(default_factory=Counter)
    unanswered: list[str] = field(default_factory=list)
    """Requests after which the server ended the connection without an answer."""
    resets: int = 0
    """Number of connections that were reset."""
    healthy: int = 0
    """Number of answers of the health route."""
    broken: list[str] = field(default_factory=list)
    """Requests that got a 500 or no answer, with the answer; tracebacks; turns that stay open."""

    def summary(self) -> str:
        codes = " ".join(f"{status}:{n}" for status, n in sorted(self.answers.items()))
        lines = [
            f"{self.plane}, seed {self.seed}: {codes}; health {self.healthy}; "
            f"unanswered {len(self.unanswered)}; reset {self.resets}"
        ]
        lines += [f"unanswered: {name}" for name in self.unanswered[:20]]
        kinds = Counter(line.partition(": ")[0] for line in self.broken)
        for kind, count in kinds.most_common(20):
            first = next(line for line in self.broken if line.startswith(kind))
            lines.append(f"BROKEN {count} times: {first[:1500]}")
        return "\n".join(lines)


async def fuzz(
    plane: str, folder: Path, requests: int, seed: int, stop: asyncio.Event | None = None
) -> Report:
    """Sends the requests, `PARALLEL` at a time, then looks at every record.

    `stop` ends it early.
    """
    report = Report(plane, seed)
    async with PLANES[plane](folder) as fuzzer:
        await fuzzer.renew()
        left = iter(range(1, requests + 1))

        async def attacker() -> None:
            for number in left:
                if stop is not None and stop.is_set():
                    return
                await _attack(fuzzer, random.Random(f"{seed}-{number}"), report)
                if number % 200 == 0:
                    fuzzer.server.rss_bytes()
                if number % REQUESTS_PER_RENEWAL == 0:
                    report.broken += await fuzzer.renew()
                    sys.stderr.write(f"{plane}: {number} requests, {len(report.broken)} broken\n")

        watch = asyncio.create_task(_watch_health(fuzzer, report))
        async with asyncio.TaskGroup() as group:
            for _ in range(PARALLEL):
                group.create_task(attacker())
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch
        report.broken += [f"traceback: {line}" for line in fuzzer.server.tracebacks()]
        report.broken += await fuzzer.renew()
        rss = fuzzer.server.rss_bytes() // 2**20
        peak = fuzzer.server.peak_rss_bytes // 2**20
        sys.stderr.write(f"{plane}: {rss} MiB of memory, {peak} MiB at most\n")
    return report


async def _attack(fuzzer: Fuzzer, rng: random.Random, report: Report) -> None:
    attack = fuzzer.attack(rng)
    manner = rng.choices(MANNERS, MANNER_WEIGHTS)[0]
    try:
        answer = await patiently(fuzzer.server.effort, _send(fuzzer.server, attack, manner))
    except OSError:  # refused before all of it was sent: a reset can overtake the answer
        report.resets += 1
        return
    except Hang as hang:
        report.broken.append(f"{attack.name}: {hang} to {attack.data[:2000]!r}")
        return
    if answer is None:
        return
    if not answer.startswith(b"HTTP/1."):
        if attack.owed:
            report.unanswered.append(attack.name)
        return
    status = int(answer[9:12])
    report.answers[status] += 1
    if status == 500:
        report.broken.append(f"{attack.name}: {answer[-300:]!r} to {attack.data[:2000]!r}")
    fuzzer.learn(answer)


async def _send(server: Server, attack: Attack, manner: Manner) -> bytes | None:
    """The beginning of the answer; None if the client hangs up without reading one."""
    reader, writer = await asyncio.open_connection(server.host, server.port)
    try:
        pieces = SLOW_PIECES if manner.slow else 1
        size = len(attack.data) // pieces + 1
        for start in range(0, len(attack.data), size):
            writer.write(attack.data[start : start + size])
            await writer.drain()
            await asyncio.sleep(SLOW_S if pieces > 1 else 0)
        if not attack.owed and not attack.then:
            writer.write_eof()
        if not manner.reads:
            await asyncio.sleep(manner.stays_s)
            return None
        answer = await reader.read(1 << 20)
        for piece in attack.then:
            writer.write(piece)
            await writer.drain()
            with suppress(TimeoutError):
                await asyncio.wait_for(reader.read(1 << 20), NEXT_S)
        return answer
    finally:
        writer.close()


async def _watch_health(fuzzer: Fuzzer, report: Report) -> None:
    """Reports each request of the health route that does not get a 200."""
    headers = {"Authorization": f"Bearer {fuzzer.health_key}"}
    data = fuzzer.request(Call("health", "GET", fuzzer.health, headers), b"")
    while True:
        try:
            work = _send(fuzzer.server, Attack("health", data), Manner())
            answer = await patiently(fuzzer.server.effort, work)
        except (OSError, Hang) as error:
            report.broken.append(f"health: {error!r}")
        else:
            if answer is not None and answer.startswith(b"HTTP/1.1 200"):
                report.healthy += 1
            else:
                report.broken.append(f"health: {answer!r}")
        await asyncio.sleep(HEALTH_S)


async def _main(planes: Sequence[str], requests: int, seed: int) -> int:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
    sys.stderr.write(f"seed {seed}\n")
    broken = 0
    for plane in planes:
        with tempfile.TemporaryDirectory(prefix=f"fuzz-{plane}-") as folder:
            report = await fuzz(plane, Path(folder), requests // len(planes), seed, stop)
        sys.stdout.write(f"{report.summary()}\n")
        sys.stdout.flush()
        broken += len(report.broken)
    sys.stdout.write(f"{broken} broken\n")
    return int(bool(broken))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.attacks.fuzz_http", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000, help="in total, of all planes")
    parser.add_argument("--planes", nargs="+", choices=list(PLANES), default=list(PLANES))
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    given = parser.parse_args()
    sys.exit(asyncio.run(_main(given.planes, given.requests, given.seed)))
