"""One of several processes on one port (started by `workers.py`).

Invariant: it prints `listening` once it listens, and ends when its standard input closes: the
process that started it has ended. If that one was killed while this one starts, nothing is logged.

After its part, each line of its standard input is a JSON list: the sockets of ended processes on
which this one accepts connections until the next line.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import sys

import orjson
import uvloop
from aiohttp import web

from proxy.errors import ConfigurationError
from proxy.extras.several_processes.siblings import ProcessSiblings
from proxy.extras.several_processes.workers import WorkerPart
from proxy.machine import logs
from proxy.machine.port import BACKLOG
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
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    siblings = ProcessSiblings(part.siblings)
    async with listen(part.config, own_socket=part.own_socket, siblings=siblings) as served:
        with contextlib.suppress(BrokenPipeError):
            os.write(sys.stdout.fileno(), b"listening\n")
        standing_in = asyncio.create_task(_stand_in(served.runner, lines))
        standing_in.add_done_callback(lambda _: stop.set())
        await stop.wait()
        standing_in.cancel()
        for listener in set(part.listeners) - {part.listener}:
            os.close(listener)
        await withdraw(served.app, part.config)
        with contextlib.suppress(asyncio.CancelledError):
            await standing_in


async def _stand_in(runner: web.AppRunner, lines: asyncio.StreamReader) -> None:
    """Accepts connections in place of ended processes, until the end of the lines."""
    sites: dict[int, web.SockSite] = {}
    async for line in lines:
        wanted: set[int] = set(orjson.loads(line))
        for listener in sites.keys() - wanted:
            await sites.pop(listener).stop()
        for listener in wanted - sites.keys():
            copy = socket.socket(fileno=os.dup(listener))
            sites[listener] = web.SockSite(runner, copy, backlog=BACKLOG)
            await sites[listener].start()


if __name__ == "__main__":
    sys.exit(main())
