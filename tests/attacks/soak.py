"""Whether the proxy's memory comes back after bursts of sessions and of large requests.

    python -m tests.attacks.soak --minutes 20

Each burst creates sessions, makes calls in them, completes and deletes them, and sends bodies of
many megabytes in between. After each burst the proxy rests, and its resident memory is measured.
What must hold: the last burst leaves at most 1.3 times the memory of before the first. The curve is
written as an SVG file.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.attacks.victim import Victim, running_victim

BOUND = 1.3
SESSIONS = 300
CALLS = 2
PARALLEL = 16
REST_S = 5.0
SAMPLE_S = 0.2
LARGE_BODIES = 4
LARGE_CHARS = 12_000_000
WIDTH, HEIGHT, MARGIN = 900, 360, 50
MIB = 2**20


@dataclass(slots=True)
class Curve:
    """Resident memory over time: (seconds, bytes), and the size after each burst."""

    points: list[tuple[float, int]] = field(default_factory=list)
    after: list[int] = field(default_factory=list)
    before: int = 0

    @property
    def peak(self) -> int:
        return max(size for _, size in self.points)

    @property
    def ratio(self) -> float:
        """The last burst's size over the size before the first."""
        return self.after[-1] / self.before

    def summary(self) -> str:
        sizes = " ".join(f"{size / MIB:.0f}" for size in self.after)
        return (
            f"memory (MiB): {self.before / MIB:.0f} before, {self.peak / MIB:.0f} at most, after "
            f"each burst: {sizes}; ratio {self.ratio:.2f}, the bound is {BOUND}"
        )

    def svg(self) -> str:
        """The curve as an image, with the bound as a dashed line."""
        end_s = max(at for at, _ in self.points) or 1.0
        top = max(self.peak, self.before * BOUND) * 1.05

        def place(at: float, size: float) -> tuple[float, float]:
            x = MARGIN + at / end_s * (WIDTH - 2 * MARGIN)
            return x, HEIGHT - MARGIN - size / top * (HEIGHT - 2 * MARGIN)

        line = " ".join("{:.1f},{:.1f}".format(*place(at, size)) for at, size in self.points)
        _, bound_y = place(0, self.before * BOUND)
        bottom = HEIGHT - MARGIN
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
            ' font-family="sans-serif" font-size="12">'
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
            f'<path d="M{MARGIN} {MARGIN}V{bottom}H{WIDTH - MARGIN}" fill="none" stroke="black"/>'
            f'<polyline points="{line}" fill="none" stroke="#1f6feb"/>'
            f'<line x1="{MARGIN}" y1="{bound_y:.1f}" x2="{WIDTH - MARGIN}" y2="{bound_y:.1f}"'
            ' stroke="#d1242f" stroke-dasharray="6 4"/>'
            f'<text x="{MARGIN}" y="{MARGIN - 10}">resident memory, at most'
            f" {self.peak / MIB:.0f} MiB; dashed: {BOUND} times before</text>"
            f'<text x="{WIDTH - MARGIN}" y="{bottom + 20}" text-anchor="end">{end_s:.0f} s</text>'
            "</svg>\n"
        )


async def soak(victim: Victim, minutes: float, sessions: int = SESSIONS) -> Curve:
    """Bursts until the time is over, at least two. The first one warms the proxy up."""
    curve, began = Curve(), time.monotonic()
    sampling = asyncio.create_task(_sample(victim, curve, began))
    try:
        async with aiohttp.ClientSession() as http:
            await _burst(victim, http, 20)
            curve.before = await _rested(victim)
            while len(curve.after) < 2 or time.monotonic() - began < minutes * 60:
                await _burst(victim, http, sessions)
                await _large_bodies(victim, http)
                curve.after.append(await _rested(victim))
                sys.stderr.write(f"{curve.summary()}\n")
    finally:
        sampling.cancel()
    return curve


async def _sample(victim: Victim, curve: Curve, began: float) -> None:
    while True:
        curve.points.append((time.monotonic() - began, victim.rss_bytes()))
        await asyncio.sleep(SAMPLE_S)


async def _rested(victim: Victim) -> int:
    await asyncio.sleep(REST_S)
    return victim.rss_bytes()


async def _burst(victim: Victim, http: aiohttp.ClientSession, sessions: int) -> None:
    numbers = iter(range(sessions))

    async def work() -> None:
        for number in numbers:
            session = await victim.control.create_session()
            messages = [{"role": "user", "content": f"Task {number}. " + "List the files. " * 200}]
            for _ in range(CALLS):
                answer = await _call(http, session.base_url, session.api_key, messages)
                messages += [answer, {"role": "user", "content": "Go on."}]
            await victim.control.complete(session.trial_id)
            await victim.control.delete(session.trial_id)

    async with asyncio.TaskGroup() as group:
        for _ in range(PARALLEL):
            group.create_task(work())


async def _large_bodies(victim: Victim, http: aiohttp.ClientSession) -> None:
    """Many small values, and one long text: both are refused, after the work of reading them."""
    session = await victim.control.create_session()
    many = [{"role": "user", "content": "a"}] * 40_000
    long = [{"role": "user", "content": "List the files.\n" * (LARGE_CHARS // 16)}]
    for messages in [many, long] * LARGE_BODIES:
        async with http.post(
            f"{session.base_url}/chat/completions",
            json={"model": "m", "messages": messages},
            headers={"Authorization": f"Bearer {session.api_key}"},
        ) as response:
            await response.read()
    await victim.control.delete(session.trial_id)


async def _call(
    http: aiohttp.ClientSession, base_url: str, key: str, messages: list[dict[str, Any]]
) -> dict[str, Any]:
    async with http.post(
        f"{base_url}/chat/completions",
        json={"model": "m", "messages": messages, "max_tokens": 64},
        headers={"Authorization": f"Bearer {key}"},
    ) as response:
        response.raise_for_status()
        answer: dict[str, Any] = (await response.json())["choices"][0]["message"]
        return answer


async def main(minutes: float, plot: Path) -> int:
    """Prints the verdict and writes the plot; returns 1 if memory did not come back."""
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        async with running_victim(Path(folder)) as victim:
            curve = await soak(victim, minutes)
    plot.parent.mkdir(parents=True, exist_ok=True)
    plot.write_text(curve.svg())
    sys.stdout.write(f"{curve.summary()}\nplot: {plot}\n")
    return int(curve.ratio > BOUND)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.attacks.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--plot", type=Path, default=Path(".cache/soak.svg"))
    given = parser.parse_args()
    sys.exit(asyncio.run(main(given.minutes, given.plot)))
