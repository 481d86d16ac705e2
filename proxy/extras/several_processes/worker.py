"""One of several processes on one port (started by `workers.py`).

Invariant: it prints `listening` once it listens, and ends when its standard input closes: the
process that started it has ended. If that one was killed while this one starts, nothing is logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import sys

import uvloop

from proxy.errors import ConfigurationError
from proxy.extras.several_processes.siblings import ProcessSiblings
from proxy.extras.several_processes.workers import WorkerPart
from proxy.machine import logs
from proxy.machine.secrecy import hide_memory
from proxy.process import listen, withdraw


def main() -> int:
    hide_memory()
    try:
        part: WorkerPart = pickle.load(sys.stdin.buffer)
    except EOFError:
        return 0
    logs.set_up(part.config.log, part.config.log_level)
    try:
        uvloop.run(_serve(part))
    except ConfigurationError as error:
        sys.stderr.write(f"agentic-proxy: {error.message}\n")
        return 2
    return 0


async def _serve(part: WorkerPart) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    loop.add_reader(sys.stdin.fileno(), stop.set)
    async with listen(
        part.config, own_socket=part.own_socket, siblings=ProcessSiblings(part.siblings)
    ) as (app, _):
        with contextlib.suppress(BrokenPipeError):
            os.write(sys.stdout.fileno(), b"listening\n")
        await stop.wait()
        await withdraw(app, part.config)


if __name__ == "__main__":
    sys.exit(main())
