"""Which answered calls are still recorded after the proxy was killed with SIGKILL under load."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
from dataclasses import dataclass

import aiohttp

from benchmarks.proxy.small_calls import BODY
from benchmarks.proxy.targets import Target

CLIENTS = 16
HEADER = "| target | answered before the kill | not in its record afterwards |\n|---|---|---|"


@dataclass(frozen=True, slots=True)
class Kill:
    target: str
    answered: int
    lost: int | None
    """Answered calls that the store does not have. None: there is no store."""

    def row(self) -> str:
        lost = "all: it has no store that outlives it" if self.lost is None else f"{self.lost}"
        return f"| {self.target} | {self.answered} | {lost} |"


async def kill(target: Target, calls: int) -> Kill:
    """Kills the target as soon as `calls` calls are answered. Each is a session of its own."""
    answered: set[str] = set()
    enough = asyncio.Event()
    names = map("kill-{}".format, itertools.count())

    async def client(session: aiohttp.ClientSession) -> None:
        for name in names:
            body = json.loads(BODY.replace("@N@", name))
            try:
                async with session.post(target.url.replace("@S@", name), json=body) as answer:
                    await answer.read()
            except aiohttp.ClientError:
                return
            if answer.status != 200:
                raise SystemExit(f"{target.name} answered {answer.status}: {await answer.text()}")
            answered.add(name)
            if len(answered) >= calls:
                enough.set()

    async with aiohttp.ClientSession(headers=target.headers) as session:
        clients = [asyncio.create_task(client(session)) for _ in range(CLIENTS)]
        killer = asyncio.create_task(enough.wait())
        await asyncio.wait([killer, *clients], return_when=asyncio.FIRST_COMPLETED)
        os.killpg(target.process.pid, signal.SIGKILL)
        await asyncio.gather(*clients)
    target.process.wait()
    if not answered:
        raise SystemExit(f"{target.name} answered no call")
    if target.kept is None:
        return Kill(target.name, len(answered), None)
    return Kill(target.name, len(answered), len(answered - await target.kept()))
