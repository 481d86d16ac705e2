"""Several processes on one port: the kernel gives each connection to one of them (SO_REUSEPORT).

`serve_workers` runs in the parent, `python -m proxy.processes.worker` is one child: it reads its
part from standard input and stops when that closes, so it does not outlive the parent, `kill -9`
included.
A child that dies is started again; the agents' retries go on from the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from proxy.config import ProxyConfig
from proxy.errors import ConfigurationError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Part:
    """What one process of several serves."""

    config: ProxyConfig
    own_socket: Path
    siblings: tuple[Path, ...]


async def serve_workers(
    config: ProxyConfig, stop: asyncio.Event, listening: Callable[[ProxyConfig, str], None]
) -> None:
    """Until `stop`; `listening` is called when every process listens.

    Raises:
        ConfigurationError: a process ended before it listened; it has said why.
    """
    if config.relay.token is not None:
        raise ConfigurationError("workers: must be 1 with relay.token: a worker joins one process")
    with tempfile.TemporaryDirectory(prefix="agentic-proxy-") as folder, _reserve(config) as port:
        # Of the plain class: how it was loaded stays here.
        config = ProxyConfig.model_construct(**{**dict(config), "port": port})
        sockets = [Path(folder) / f"{number}.sock" for number in range(config.workers)]
        parts = [Part(config, own, tuple(s for s in sockets if s != own)) for own in sockets]
        ready = [asyncio.Event() for _ in parts]
        keepers = [
            asyncio.create_task(_keep(part, is_ready, stop))
            for part, is_ready in zip(parts, ready, strict=True)
        ]
        all_ready = asyncio.create_task(_all(ready))
        try:
            await asyncio.wait([all_ready, *keepers], return_when=asyncio.FIRST_COMPLETED)
            if all_ready.done():
                url = config.public_url or f"http://{config.host}:{port}"
                listening(config, url.rstrip("/"))
            await asyncio.gather(*keepers)
        finally:
            stop.set()
            all_ready.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)


async def _all(events: Iterable[asyncio.Event]) -> None:
    for event in events:
        await event.wait()


async def _keep(part: Part, ready: asyncio.Event, stop: asyncio.Event) -> None:
    """Runs the child, again and again if it dies, until `stop`."""
    stopping = asyncio.create_task(stop.wait())
    try:
        while not stop.is_set():
            child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "proxy.processes.worker"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write(pickle.dumps(part))
            if not await child.stdout.readline():
                await child.wait()
                raise ConfigurationError("a worker process did not start: see its message above")
            ready.set()
            ended = asyncio.create_task(child.wait())
            await asyncio.wait([ended, stopping], return_when=asyncio.FIRST_COMPLETED)
            if not stop.is_set():
                _log.error("worker %d ended with code %s: starting another", child.pid, await ended)
            child.stdin.close()
            await ended
    finally:
        stopping.cancel()


@contextlib.contextmanager
def _reserve(config: ProxyConfig) -> Iterator[int]:
    """The port, held by a socket that listens to nobody."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            holder.bind((config.host, config.port))
        except OSError as error:
            raise ConfigurationError(
                f"port: {config.host}:{config.port} cannot be listened on: {error.strerror}; "
                "free it or give another --port"
            ) from error
        yield int(holder.getsockname()[1])
