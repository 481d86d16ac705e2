"""The client for threads, without a server."""

from __future__ import annotations

import _thread
import asyncio
import threading

import pytest

from agent_loop.swarm.sync_client import _LoopThread


def test_interrupted_call_does_not_go_on() -> None:
    loop, ended = _LoopThread(), threading.Event()

    async def claim() -> None:
        try:
            _thread.interrupt_main()
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(KeyboardInterrupt):
        loop.run(claim())
    assert ended.wait(2.0)
    loop.close()
