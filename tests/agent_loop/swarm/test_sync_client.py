"""The client for threads, without a server."""

from __future__ import annotations

import asyncio
import signal
import threading

import pytest

from agent_loop.swarm.sync_client import _LoopThread


def test_interrupted_call_does_not_go_on() -> None:
    loop, ended = _LoopThread(), threading.Event()

    async def claim() -> None:
        try:
            # A real signal: the lock that the main thread waits for notices no other one.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(KeyboardInterrupt):
        loop.run(claim())
    assert ended.wait(2.0)
    loop.close()
