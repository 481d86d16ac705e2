"""Several processes on one port: the kernel gives each connection to one of them (SO_REUSEPORT).

`serve_workers` runs in the parent. `worker.py` is the program of a child: it reads its part from
standard input and stops when that closes, so that it never outlives the parent, even after
`kill -9`. A child that ends is started again, also if it ends during its start; the agents' retries
continue from the store.

Invariant: once a child has listened, the port refuses no connection until `stop`. The parent holds
a socket for each child, which the children inherit. While a child is dead, a living one accepts on
its socket; while all are, connections wait in the sockets' backlogs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import pickle
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from proxy.config import ProxyConfig
from proxy.errors import ConfigurationError
from proxy.machine.port import bind_socket, family, http_url
from proxy.machine.swept_folder import swept_folder

WORKER = (sys.executable, "-m", "proxy.extras.several_processes.worker")
"""The child's command."""
REFUSED = 2
"""The child's exit code if its configuration is wrong; the child has printed why."""
MAX_FAILED_STARTS = 5
RESTART_DELAY_S = 0.5
"""Delay after the first failed start; it doubles with each of the next `MAX_FAILED_STARTS` - 1."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerPart:
    """What one of several processes serves."""

    config: ProxyConfig
    own_socket: Path
    siblings: tuple[Path, ...]
    listener: int
    """The process's own socket on the port, an inherited file descriptor (`config.listen_fd`)."""
    listeners: tuple[int, ...]
    """Those of all processes."""


async def serve_workers(
    config: ProxyConfig, stop: asyncio.Event, listening: Callable[[ProxyConfig, str], None]
) -> None:
    """Runs the processes until `stop`. Calls `listening` when all of them listen.

    Raises:
        ConfigurationError: a process refuses its configuration, or repeatedly fails to start.
    """
    if config.relay is not None and config.relay.token is not None:
        raise ConfigurationError(
            "workers must be 1 with relay.token, because a relay worker joins one process"
        )
    with swept_folder("agentic-proxy-workers-") as folder, contextlib.ExitStack() as held:
        listeners = [held.enter_context(each) for each in _bind(config)]
        port = int(listeners[0].getsockname()[1])
        # ProxyConfig can be pickled, but the class that `load_config` returns cannot.
        config = ProxyConfig.model_construct(**{**dict(config), "port": port})
        parts = _parts(config, tuple(each.fileno() for each in listeners), folder)
        ready = [asyncio.Event() for _ in parts]
        living = Living(parts[0].listeners)
        keepers = [
            asyncio.create_task(_keep(part, living, is_ready, stop))
            for part, is_ready in zip(parts, ready, strict=True)
        ]
        keepers.append(asyncio.create_task(_release(held, stop)))
        all_ready = asyncio.create_task(_all(ready))
        try:
            await asyncio.wait([all_ready, *keepers], return_when=asyncio.FIRST_COMPLETED)
            if all_ready.done():
                url = config.public_url or http_url(config.host, port)
                listening(config, url.rstrip("/"))
            await asyncio.gather(*keepers)
        finally:
            stop.set()
            all_ready.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)


async def _all(events: Iterable[asyncio.Event]) -> None:
    for event in events:
        await event.wait()


class Living:
    """The children that listen, and which of them accepts on the sockets of the dead ones."""

    def __init__(self, listeners: Sequence[int]) -> None:
        self._listeners = listeners
        self._inputs: dict[int, asyncio.StreamWriter] = {}

    @contextlib.contextmanager
    def joined(self, listener: int, child: asyncio.StreamWriter) -> Iterator[None]:
        """While the context is open, the child with this standard input accepts on `listener`."""
        self._inputs[listener] = child
        self._assign()
        try:
            yield
        finally:
            del self._inputs[listener]
            self._assign()

    def _assign(self) -> None:
        """Tells each child the sockets on which it accepts besides its own."""
        orphans = [each for each in self._listeners if each not in self._inputs]
        for child in self._inputs.values():
            if not child.is_closing():
                child.write(json.dumps(orphans).encode() + b"\n")
                orphans = []


async def _keep(
    part: WorkerPart, living: Living, ready: asyncio.Event, stop: asyncio.Event
) -> None:
    """Runs the child, and starts it again whenever it ends, until `stop`. Once a child has
    listened, the configuration is right, and failed starts have no limit.

    Raises:
        ConfigurationError: the child refused its configuration at the first start, or ended
            `MAX_FAILED_STARTS` times in a row before it ever listened.
    """
    failed_starts = 0
    while not stop.is_set():
        child = await asyncio.create_subprocess_exec(
            *WORKER,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=part.listeners,
        )
        if await _listens(child, part):
            failed_starts = 0
            ready.set()
            assert child.stdin is not None
            with living.joined(part.listener, child.stdin):
                await _until_ended(child, stop)
            continue
        code = await child.wait()
        failed_starts += 1
        if code == REFUSED and not ready.is_set():
            raise ConfigurationError("a worker process did not start; see its message above")
        if failed_starts == MAX_FAILED_STARTS and not ready.is_set():
            raise ConfigurationError(
                f"a worker process ended {failed_starts} times in a row before it listened, last"
                f" with code {code}; see the messages above"
            )
        _log.error(
            "worker process %d ended with code %s before it listened; restarting", child.pid, code
        )
        doublings = min(failed_starts, MAX_FAILED_STARTS) - 1
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), RESTART_DELAY_S * 2**doublings)


async def _listens(child: Process, part: WorkerPart) -> bool:
    """Gives the child its part and waits. False when it ended before it listened."""
    assert child.stdin is not None
    assert child.stdout is not None
    if child.stdin.is_closing():  # uvloop refuses to write to a child that has ended
        return False
    child.stdin.write(pickle.dumps(part))
    return bool(await child.stdout.readline())


async def _until_ended(child: Process, stop: asyncio.Event) -> None:
    """Returns when the child has ended, by itself or because of `stop`."""
    assert child.stdin is not None
    stopping, ended = asyncio.create_task(stop.wait()), asyncio.create_task(child.wait())
    try:
        await asyncio.wait([ended, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            _log.error("worker process %d ended with code %s; restarting", child.pid, await ended)
        child.stdin.close()
        await ended
    finally:
        stopping.cancel()


def _bind(config: ProxyConfig) -> list[socket.socket]:
    """A socket on the port for each process. None of them listens before its process does."""
    bound: list[socket.socket] = []
    port = config.port
    for _ in range(config.workers):
        each = socket.socket(family(config.host))
        bound.append(each)
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if each.family == socket.AF_INET6:
            each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bind_socket(each, "port", config.host, port)
        port = int(each.getsockname()[1])
    return bound


def _parts(config: ProxyConfig, listeners: tuple[int, ...], folder: Path) -> list[WorkerPart]:
    sockets = [folder / f"{number}.sock" for number in range(config.workers)]
    parts = []
    for own, listener in zip(sockets, listeners, strict=True):
        with_socket = ProxyConfig.model_construct(**{**dict(config), "listen_fd": listener})
        others = tuple(each for each in sockets if each != own)
        parts.append(WorkerPart(with_socket, own, others, listener, listeners))
    return parts


async def _release(held: contextlib.ExitStack, stop: asyncio.Event) -> None:
    """Closes the parent's sockets at `stop`, so that the port closes as the children end."""
    await stop.wait()
    held.close()
