"""A proxy's owner number among the proxies on one PostgreSQL database.

Invariant: the number's advisory lock is held exactly as long as the connection that took it is
open, so that PostgreSQL itself knows which proxies are alive.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import asyncpg

from proxy.errors import StoreError

OWNERS_LOCK = 0x61677278
"""First key of the advisory locks; the second key is the owner's number."""
KEEP_ALIVES = {
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
}
"""For the connection that holds an owner's lock: a machine that stops responding loses the lock
after 20 s."""
CONNECTION_ERRORS = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # the connection broke on its return to the pool
    OSError,
    TimeoutError,
)
AWAY = (
    OSError,
    asyncpg.PostgresConnectionError,
    asyncpg.CannotConnectNowError,  # it is starting
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
)
"""What a connection fails with while PostgreSQL restarts, or another machine takes over."""
PATIENCE_S = 30.0
"""Seconds that a statement waits for PostgreSQL to accept connections. The agents' clients repeat a
call that gets a 503 within seconds and then give up, mostly after two attempts."""
RETRY_S = 0.2
T = TypeVar("T")


async def patiently(connect: Callable[[], Awaitable[T]]) -> T:
    """Connects, and while PostgreSQL is away tries again for `PATIENCE_S`. Nothing is done twice,
    because a statement is sent only when there is a connection.

    Raises:
        CONNECTION_ERRORS: those of the last attempt.
    """
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return await connect()
        except AWAY:
            if time.monotonic() >= until:
                raise
        await asyncio.sleep(RETRY_S)


class PostgresOwner:
    """This proxy's number, and the connection that holds its lock. Create it with `take`."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._taking = asyncio.Lock()
        self._connection: asyncpg.Connection | None = None
        self._number = 0
        self._address: str | None = None

    @classmethod
    async def take(cls, url: str) -> PostgresOwner:
        owner = cls(url)
        await owner._take()
        return owner

    async def number(self) -> int:
        """The number: a new one after the connection was lost, and then turns of the old one are
        cut."""
        if self._is_lost:
            async with self._taking:
                if self._is_lost:
                    try:
                        await patiently(self._take)
                    except CONNECTION_ERRORS as error:
                        raise StoreError(f"the store failed: {error}") from error
        return self._number

    async def announce(self, address: str | None) -> None:
        """None: it can no longer be reached, as after its connection was lost."""
        self._address = address
        if address is None and self._is_lost:
            return
        number = await self.number()
        assert self._connection is not None
        try:
            await self._connection.execute(
                "UPDATE owners SET address = $1 WHERE number = $2", address, number
            )
        except CONNECTION_ERRORS as error:
            raise StoreError(f"the store failed: {error}") from error

    @property
    def _is_lost(self) -> bool:
        return self._connection is None or self._connection.is_closed()

    async def release(self) -> None:
        if self._connection is not None:
            await self._connection.close()

    async def _take(self) -> None:
        connection = await asyncpg.connect(self._url, server_settings=KEEP_ALIVES)
        self._number = await connection.fetchval(
            "INSERT INTO owners (address) VALUES ($1) RETURNING number", self._address
        )
        await connection.execute("SELECT pg_advisory_lock($1, $2)", OWNERS_LOCK, self._number)
        self._connection = connection
