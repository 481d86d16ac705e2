"""Removes sessions that ended long ago, so that a long-running proxy needs bounded space.

Invariant: a session is removed only if it was completed or expired more than
`retention.completed_s` seconds ago. It is removed with all its turns, rewards and events.
"""

from __future__ import annotations

import asyncio
import logging
import time

from proxy.errors import StoreError
from proxy.store.protocol import Store

CHECK_INTERVAL_S = 60.0
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


async def keep_removing(store: Store, completed_s: float) -> None:
    """Removes old sessions now and every `CHECK_INTERVAL_S`, until it is cancelled."""
    while True:
        try:
            removed = await remove_old_sessions(store, completed_s, now=time.time())
        except StoreError as error:
            _log.warning("cannot remove old sessions, will try again: %s", error.message)
        else:
            if removed:
                _log.info("removed %d sessions that ended over %g s ago", removed, completed_s)
        await asyncio.sleep(CHECK_INTERVAL_S)
