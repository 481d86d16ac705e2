"""Blocking work in a thread that a cancellation does not leave behind."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


async def run_to_end(function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Calls the function in a thread, as asyncio.to_thread does, but a cancellation is raised only
    after the function has returned or raised. So the caller can safely clean up what it made.

    Raises:
        asyncio.CancelledError: the caller was cancelled while the function ran.
    """
    working = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        while not working.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([working])
        working.exception()  # the cancellation takes precedence over a failure of the function
        raise
