"""The harbor-servers of a run: which one gets a trial, and how many trials each of them has.

A trial goes to the server that has the fewest of this run's trials. Invariant: no server has more
than `trials_each` of them; further trials wait. A server that does not answer, or whose queue is
full, gets no trial for `AWAY_S`, unless this is so for all of them.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from agent_loop.errors import LaunchError
from harbor_sdk import AgentRunClient
from proxy.machine.direct_hosts import proxy_for

AWAY_S = 30.0
"""Seconds, enough to restart a harbor-server."""


@dataclass(slots=True, eq=False)
class HarborServer:
    """One server. Example: HarborServer("http://10.0.0.7:8090", client)"""

    url: str
    client: AgentRunClient
    running: int = 0
    """Number of this run's trials that it has, queued ones included."""
    away_until: float = -math.inf
    """On the monotonic clock."""

    @property
    def is_away(self) -> bool:
        return self.away_until > time.monotonic()

    def avoid(self) -> None:
        """To be called when it did not answer, or when its queue was full."""
        self.away_until = time.monotonic() + AWAY_S


class HarborServers:
    """Example: async with servers.place() as server: await server.client.submit(request)"""

    def __init__(self, urls: Sequence[str], trials_each: int | None, wait_s: float) -> None:
        """A trial waits for at most `wait_s` for a server with room."""
        self._servers = [
            HarborServer(url, AgentRunClient(url, proxy=proxy_for(url))) for url in urls
        ]
        self._trials_each = trials_each or math.inf
        self._wait_s = wait_s
        self._left = asyncio.Condition()

    def __len__(self) -> int:
        return len(self._servers)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[HarborServer]:
        """Waits for room at a server, and holds it.

        Raises:
            LaunchError: there was no room, or no server answers.
        """
        try:
            async with asyncio.timeout(self._wait_s):
                server = await self._take()
        except TimeoutError:
            raise LaunchError(
                f"harbor: no room at {len(self)} servers after {self._wait_s:.0f} s: raise "
                "server_trials or server_timeout_s, lower rollout.concurrency, or add "
                "servers"
            ) from None
        try:
            yield server
        finally:
            await self._leave(server)

    async def _take(self) -> HarborServer:
        for _ in self._servers:
            async with self._left:
                while (server := self._least_loaded()) is None:
                    await self._changed()
                server.running += 1
            try:
                if len(self) == 1 or await server.client.is_up():
                    return server
            except BaseException:
                await self._leave(server)
                raise
            server.avoid()
            await self._leave(server)
        raise LaunchError(
            f"harbor: none of {len(self)} servers answers: "
            f"{', '.join(server.url for server in self._servers)}; start them, or correct "
            "remote_agent.harbor.server_url"
        )

    async def _changed(self) -> None:
        """Waits until a trial leaves a server, or a server may be back."""
        back = min((server.away_until for server in self._servers if server.is_away), default=None)
        with suppress(TimeoutError):
            async with asyncio.timeout(None if back is None else back - time.monotonic()):
                await self._left.wait()

    async def _leave(self, server: HarborServer) -> None:
        server.running -= 1
        async with self._left:
            self._left.notify(len(self))  # more than one, because a server may be back

    async def close(self) -> None:
        await asyncio.gather(*(server.client.close() for server in self._servers))

    def _least_loaded(self) -> HarborServer | None:
        present = [server for server in self._servers if not server.is_away] or self._servers
        with_room = [server for server in present if server.running < self._trials_each]
        return min(with_room, key=lambda server: server.running, default=None)
