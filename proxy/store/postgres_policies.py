"""The published policies in PostgreSQL, and the notifications of their changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import asyncpg

from proxy.errors import StoreError
from proxy.store.postgres_owner import CONNECTION_ERRORS, KEEP_ALIVES

CHANNEL = "agentic_proxy_policies"

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
        connection = await asyncpg.connect(url, server_settings=KEEP_ALIVES)
    except CONNECTION_ERRORS as error:
        raise StoreError(f"the store failed: {error}") from error
    try:
        connection.add_termination_listener(lambda *_: changed.set())
        await connection.add_listener(CHANNEL, lambda *_: changed.set())
        while not connection.is_closed():
            changed.clear()
            yield
            await changed.wait()
        raise StoreError("the store failed: its connection for notifications was closed")
    except CONNECTION_ERRORS as error:
        raise StoreError(f"the store failed: {error}") from error
    finally:
        connection.terminate()
