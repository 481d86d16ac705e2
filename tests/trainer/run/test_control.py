"""Signals ask a run to stop; the terminal's, too, which may come twice."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from trainer.run.control import RunControl, StopRequested


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


async def test_closed_terminal_stops_the_run_once_though_shell_and_kernel_both_say_so() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    control = RunControl()
    with control.signals():
        os.kill(os.getpid(), signal.SIGHUP)
        with pytest.raises(StopRequested):
            await control.wait_for(asyncio.Event().wait())
        os.kill(os.getpid(), signal.SIGHUP)
    assert control.signal_number == signal.SIGHUP


async def test_run_under_nohup_goes_on_without_its_terminal() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    control = RunControl()
    with control.signals():
        os.kill(os.getpid(), signal.SIGHUP)
        assert not control.stopping
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
