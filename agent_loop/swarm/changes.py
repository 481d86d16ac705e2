"""A counter that wakes whoever waits for it: long-polls and the reaper, without sleeping."""

from __future__ import annotations

import asyncio


class Changes:
    def __init__(self) -> None:
        self.count = 0
        self._event = asyncio.Event()

    def notify(self) -> None:
        self.count += 1
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self) -> None:
        """Until the next `notify`."""
        await self._event.wait()
