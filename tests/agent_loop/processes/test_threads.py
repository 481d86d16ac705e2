"""Blocking work that a cancellation does not leave behind."""

from __future__ import annotations

import asyncio
import threading

import pytest

from agent_loop.processes.threads import run_to_end


async def test_result_and_error_of_the_function_are_passed_on() -> None:
    assert await run_to_end(int, "12", base=3) == 5
    with pytest.raises(ValueError, match="invalid literal"):
        await run_to_end(int, "x")


@pytest.mark.parametrize("fails", [False, True])
async def test_cancellation_is_raised_after_the_function_has_ended(fails: bool) -> None:
    began, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        may_end.wait()
        ended.set()
        if fails:
            raise OSError("disk full")

    caller = asyncio.ensure_future(run_to_end(work))
    await asyncio.to_thread(began.wait)
    for _ in range(3):  # repeated cancellations do not shorten the wait either
        caller.cancel()
        await asyncio.sleep(0)
    assert not caller.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended.is_set()
