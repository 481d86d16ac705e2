"""Ends of a run that come from outside: Ctrl-C, SIGTERM, a service that died.

Invariant: whatever a run waits for, it stops waiting when it is told to stop or when an engine or
the proxy has ended; what it waited for is cancelled and has cleaned up before the wait ends.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class StopRequested(Exception):
    """The run was asked to stop: it saves and ends."""


class RunControl:
    def __init__(self) -> None:
        self._stop = asyncio.Event()
        self._services: asyncio.Task[None] | None = None
        self.signal_number: int | None = None

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    def watch(self, services: asyncio.Task[None]) -> None:
        """From now on the end of `services` is an error of whatever is waited for."""
        self._services = services

    def request_stop(self, signal_number: int) -> None:
        self.signal_number = signal_number
        self._stop.set()

    async def wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, unless the run has to end first.

        Raises:
            StopRequested, or the services' TrainerError.
        """
        task = asyncio.ensure_future(work)
        stop = asyncio.create_task(self._stop.wait())
        others: set[asyncio.Future[Any]] = {stop}
        if self._services is not None:
            others.add(self._services)
        try:
            await asyncio.wait({task, *others}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                if self._services is not None and self._services.done():
                    self._services.result()
                raise StopRequested
            return task.result()
        finally:
            stop.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    @contextmanager
    def signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM ask to stop; a second one ends us at once, and our guards the rest."""
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM)

        def on_signal(number: int) -> None:
            self.request_stop(number)
            for each in numbers:
                loop.remove_signal_handler(each)
                signal.signal(each, signal.SIG_DFL)

        for number in numbers:
            loop.add_signal_handler(number, on_signal, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)
