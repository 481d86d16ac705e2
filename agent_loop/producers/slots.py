"""`TrialSlots`: how many trials run at the same time, and whether new ones may start."""

from __future__ import annotations

import asyncio
from typing import Literal


class TrialSlots(asyncio.Semaphore):
    """A semaphore that gives out no slot while it is paused. Waiters keep their order.

    Example: slots = TrialSlots(32); slots.pause()    # trials that run continue, no other starts
    """

    def __init__(self, trials: int) -> None:
        super().__init__(trials)
        self._open = asyncio.Event()
        self._open.set()

    def pause(self) -> None:
        self._open.clear()

    def resume(self) -> None:
        self._open.set()

    async def acquire(self) -> Literal[True]:
        while True:
            await self._open.wait()
            await super().acquire()
            if self._open.is_set():
                return True
            self.release()  # paused while this trial waited for its slot
