"""The client for threads, without a server."""

from __future__ import annotations

import asyncio
import signal
import threading
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest

from agent_loop.extras.swarm.sync_client import _LoopThread


def test_interrupted_call_does_not_go_on() -> None:
    loop, ended = _LoopThread(), threading.Event()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    async def claim() -> None:
        try:
            # A real signal, for the lock that the main thread waits for; SIGINT may be ignored.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            await asyncio.Event().wait()
        finally:
            ended.set()

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            loop.run(claim())
        assert ended.wait(60.0)
    finally:
        signal.signal(signal.SIGUSR1, before)
        loop.close()


def test_call_that_is_interrupted_as_it_is_handed_over_does_not_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop's thread may run it before the caller knows how to cancel it."""
    loop, begun, hand_over = _LoopThread(), threading.Event(), asyncio.run_coroutine_threadsafe
    handed_over: list[Future[Any]] = []

    async def claim() -> None:
        begun.set()

    def interrupted(*work: Any) -> None:
        handed_over.append(hand_over(*work))
        raise KeyboardInterrupt

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loop.run(claim())
    with pytest.raises(CancelledError):
        handed_over[0].result(60.0)
    assert not begun.is_set()
    loop.close()
