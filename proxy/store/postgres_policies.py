"""The published policies in PostgreSQL, and the notifications of their changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import asyncpg

from proxy.errors import StoreError
from proxy.store.postgres_owner import CONNECTION_ERRORS, KEEP_ALIVES

CHANNEL = "agentic_proxy_policies"
CHECK_S = 30.0
"""Seconds without a notification after which the server is asked whether it is there: after a
fail-over or a break of the network, a connection may stay open for ever."""
ANSWER_S = 10.0
"""Seconds that it has for an answer on this connection."""

CURRENT = "SELECT name, version, adapter, run FROM policies"
# The notification is sent when the transaction is committed.
PUBLISH = (
    "WITH published AS (INSERT INTO policies AS p (name, version, adapter, run)"
    " VALUES ($1, $2, $3, $4) ON CONFLICT (name) DO UPDATE SET"
    " version = excluded.version, adapter = excluded.adapter, run = excluded.run"
    " WHERE p.run IN ('', excluded.run) RETURNING name)"
    f" SELECT pg_notify('{CHANNEL}', name) FROM published"
)
RELEASE = "UPDATE policies SET run = '' WHERE name = $1 AND run = $2"


async def changes(url: str) -> AsyncGenerator[None]:
    """Yields when it listens, and after each change since then; several changes at once may be
    reported as one. It has a connection of its own.

    Raises:
        StoreError: the connection failed.
    """
    changed = asyncio.Event()
    try:
        connection = await asyncpg.connect(
            url, server_settings=KEEP_ALIVES, command_timeout=ANSWER_S
        )
    except CONNECTION_ERRORS as error:
        raise StoreError(f"the store failed: {error}") from error
    try:
        connection.add_termination_listener(lambda *_: changed.set())
        await connection.add_listener(CHANNEL, lambda *_: changed.set())
        while not connection.is_closed():
            changed.clear()
            yield
            while not await _is_set(changed, CHECK_S):
                await connection.execute("SELECT 1")
        raise StoreError("the store failed: its connection for notifications was closed")
    except TimeoutError as error:
        message = f"it did not answer within {ANSWER_S:.0f} s on the connection for notifications"
        raise StoreError(f"the store failed: {message}") from error
    except CONNECTION_ERRORS as error:
        raise StoreError(f"the store failed: {error}") from error
    finally:
        connection.terminate()


async def _is_set(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
