"""The client for threads, without a server."""

from __future__ import annotations

import asyncio
import signal
import threading

import pytest

from agent_loop.swarm.sync_client import _LoopThread


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
