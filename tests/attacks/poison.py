"""How long other calls wait while some requests kill the engines that sample them.

    python -m tests.attacks.poison --minutes 20 --share 0.01

Four scripted engines, each of which ends when it samples a poisonous request and is started again
0.3 s later. What must hold: every poisonous request is refused as such, every other call has its
whole answer, and none of them takes longer than BOUND_S, less what this program waited for a
processor.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
from collections import Counter
from dataclasses import dataclass, field

from proxy.errors import RequestError
from proxy.routing.blame import ENGINES_LOST_LATE
from tests.attacks.server import effort
from tests.proxy.routing.test_blame import ANSWER, POISON, Engines

BOUND_S = 5.0
AGENTS, PAUSE_S, PROGRESS_S = 12, 0.2, 60.0


@dataclass
class Report:
    answered: int = 0
    refused: int = 0
    deaths: Counter[int] = field(default_factory=Counter)
    """How many poisonous requests ended how many engines."""
    worst_s: float = 0.0
    """The longest call that was not poisonous, less what was waited for a processor."""
    worst_wall_s: float = 0.0
    faults: list[str] = field(default_factory=list)


async def poison(minutes: float, share: float, rng: random.Random) -> Report:
    engines, report = Engines(4), Report()
    await engines.start()
    loop = asyncio.get_running_loop()
    end, own, numbers = loop.time() + 60 * minutes, [os.getpid()], iter(range(1, 10**9))

    async def bad(session: str) -> None:
        try:
            await engines.call([POISON, next(numbers)], session)
        except RequestError as error:
            report.refused += error.code == "engines_lost"
            if error.code != "engines_lost":
                report.faults.append(f"a poisonous request was refused with {error!r}")
        else:
            report.faults.append("a poisonous request was answered")

    async def good(session: str, number: int, turn: int) -> None:
        begun, waited = loop.time(), effort(own).waited_s
        if await engines.call([number + 1, turn % 500 + 1], session) != ANSWER:
            report.faults.append("an answer was not whole")
        wall_s = loop.time() - begun
        report.answered += 1
        report.worst_wall_s = max(report.worst_wall_s, wall_s)
        report.worst_s = max(report.worst_s, wall_s - (effort(own).waited_s - waited))

    async def agent(number: int) -> None:
        turn = 0
        while loop.time() < end:
            turn += 1
            session = f"s{number}-{turn // 50}"
            await (bad(session) if rng.random() < share else good(session, number, turn))
            await asyncio.sleep(PAUSE_S * rng.random())

    async def progress() -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            print(report, flush=True)

    said = asyncio.create_task(progress())
    try:
        await asyncio.gather(*(agent(number) for number in range(AGENTS)))
    finally:
        said.cancel()
        await engines.close()
    report.deaths = Counter(engines.deaths.values())
    if most := [count for count in report.deaths if count > ENGINES_LOST_LATE]:
        report.faults.append(f"a request ended {max(most)} engines")
    if report.worst_s > BOUND_S:
        report.faults.append(f"a call took {report.worst_s:.1f} s")
    return report


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attacks.poison", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--share", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    given = parser.parse_args()
    report = asyncio.run(poison(given.minutes, given.share, random.Random(given.seed)))
    print(f"seed {given.seed}: {report}")
    return int(bool(report.faults))


if __name__ == "__main__":
    sys.exit(main())
