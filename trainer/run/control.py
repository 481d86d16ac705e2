"""External events that end a run: Ctrl-C, SIGTERM, a terminal that closes (SIGHUP), the end of one
of its processes.

Invariant: a run stops waiting when it is asked to stop, or when an engine, the proxy or a rank of
the trainer has ended and is not restarted. The work that it waited for is cancelled, and has
cleaned up before the wait ends.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

T = TypeVar("T")

Ended = Literal["done", "stopped"]
"""How a run ended. `done`: it reached the configured end; `stopped`: it was asked to stop, and has
saved a checkpoint."""


async def first_to_end(works: Iterable[Coroutine[Any, Any, T]]) -> T:
    """The result or the error of the work that ends first; the rest is cancelled. Never returns if
    there is no work."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        if not tasks:
            await asyncio.Event().wait()
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return await next(iter(done))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class StopRequested(Exception):
    """The run was asked to stop; it saves and ends."""


class RunControl:
    """Example:
    with control.signals():
        groups = await control.wait_for(producer.next_batch(version))
    """

    def __init__(self) -> None:
        self._stop = asyncio.Event()
        self._watched: set[asyncio.Task[None]] = set()
        self.signal_number: int | None = None

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    def watch(self, needed: asyncio.Task[None]) -> None:
        """After `needed` has ended, `wait_for` and `finish` raise its error. Its owner cancels it
        when it is no longer needed.
        """
        self._watched.add(needed)

        def forget(task: asyncio.Task[None]) -> None:
            if task.cancelled():
                self._watched.discard(task)

        needed.add_done_callback(forget)

    def request_stop(self, signal_number: int) -> None:
        self.signal_number = signal_number
        self._stop.set()

    async def wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, unless the run has to end first.

        Raises:
            StopRequested, or the TrainerError of the process that ended.
        """
        stop = asyncio.create_task(self._stop.wait())
        try:
            return await self._first(work, stop)
        finally:
            stop.cancel()

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, even if the run was asked to stop.

        Raises:
            The TrainerError of the process that ended.
        """
        return await self._first(work)

    async def _first(self, work: Coroutine[Any, Any, T], *stop: asyncio.Task[Any]) -> T:
        task = asyncio.ensure_future(work)
        try:
            others = {*stop, *self._watched}
            await asyncio.wait({task, *others}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                for watched in self._watched:
                    if watched.done():
                        watched.result()
                raise StopRequested
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    @contextmanager
    def signals(self) -> Iterator[None]:
        """A context in which SIGINT, SIGTERM and SIGHUP request a stop; SIGHUP does not if this
        process ignores it (nohup). A second SIGINT or SIGTERM ends this process at once; the guards
        then end the other processes. Not a second SIGHUP: shell and kernel each send one."""
        loop = asyncio.get_running_loop()
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)

        def on_signal(number: int) -> None:
            self.request_stop(number)
            for each in numbers:
                loop.remove_signal_handler(each)
                again = signal.SIG_IGN if each == signal.SIGHUP else signal.SIG_DFL
                signal.signal(each, again)

        for number in numbers:
            loop.add_signal_handler(number, on_signal, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)
