"""Removes sessions that have ended, so that a long-running proxy needs bounded space.

Invariant: a session is removed only if it was completed or expired more than
`retention.completed_s` seconds ago, or if the store is larger than `retention.max_bytes` and no
other session ended before it. It is removed with all its turns, rewards and events.
"""

from __future__ import annotations

import asyncio
import logging
import time

from proxy.config import RetentionConfig
from proxy.errors import StoreError
from proxy.store.protocol import Store

CHECK_INTERVAL_S = 60.0
UNREAD_S = 300.0
"""Seconds after its end in which a session is not removed because of the store's size: its record
may still have to be read."""
AT_ONCE = 4
"""Sessions per transaction; few, so that the writes of calls hardly wait for it."""

_log = logging.getLogger(__name__)


async def remove_old_sessions(store: Store, completed_s: float, *, now: float) -> int:
    """Removes every session that ended more than `completed_s` before `now` (Unix seconds).

    Returns the number of sessions removed. Raises StoreError.
    """
    total = 0
    while removed := await store.remove_ended(now - completed_s, AT_ONCE):
        total += removed
    return total


async def shrink_store(store: Store, max_bytes: int, *, now: float) -> int:
    """Removes the sessions that ended first, until the store has at most `max_bytes`, or no session
    that ended more than `UNREAD_S` before `now`.

    Returns the number of sessions removed. Raises StoreError.
    """
    total = 0
    while (await store.used_bytes() or 0) > max_bytes:
        removed = await store.remove_ended(now - UNREAD_S, 1)
        if not removed:
            break
        total += removed
    return total


async def keep_removing(store: Store, keep: RetentionConfig) -> None:
    """Removes old sessions now and every `CHECK_INTERVAL_S`, until it is cancelled."""
    while True:
        removed = 0
        try:
            if keep.completed_s is not None:
                removed += await remove_old_sessions(store, keep.completed_s, now=time.time())
            if keep.max_bytes is not None:
                removed += await shrink_store(store, keep.max_bytes, now=time.time())
        except StoreError as error:
            _log.warning("cannot remove old sessions, will try again: %s", error.message)
        else:
            if removed:
                _log.info("removed %d sessions that had ended", removed)
        await asyncio.sleep(CHECK_INTERVAL_S)
