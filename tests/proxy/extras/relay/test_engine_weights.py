"""Reports of an engine's workers, which write to a pipe."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import pytest

from proxy.extras.relay.engine_weights import reports

LINE = b'{"digest":"d","reason":""}\n'


async def test_pipe_that_seems_readable_and_is_empty_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The event loop may say once more that there is something, which was read meanwhile."""
    loop = asyncio.get_running_loop()
    add_reader, (reading, writing) = loop.add_reader, os.pipe()
    os.set_blocking(reading, False)

    def eager(descriptor: int, said: Callable[[], None]) -> None:
        add_reader(descriptor, said)
        said()

    monkeypatch.setattr(loop, "add_reader", eager)
    told = asyncio.create_task(reports(reading, "d", 2))
    for part in (LINE[:9], LINE[9:] + LINE.replace(b'"d"', b'"other"'), LINE):
        await asyncio.sleep(0)
        assert not told.done()
        os.write(writing, part)
    await told
    for descriptor in (reading, writing):
        os.close(descriptor)
