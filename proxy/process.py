"""One proxy process: starts an engine if none was given, and listens on the port.

Invariant: it listens only after everything else has started, and when it ends, no process that it
started is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from aiohttp import web

from proxy.app import CONTROL_PLANE, STORE, build_app
from proxy.config import EngineConfig, ProxyConfig
from proxy.control.siblings import Siblings
from proxy.engines.vllm_server import VllmConfig, VllmServer
from proxy.errors import ConfigurationError, EngineError, StoreError
from proxy.extra import Invitation, open_extras
from proxy.extra_registry import SEVERAL_PROCESSES
from proxy.http.server import app_runner
from proxy.machine.file_lock import free_path
from proxy.machine.open_files import calls_that_fit, raise_limit
from proxy.machine.port import BACKLOG, http_url, unusable_port
from proxy.serving.forwarding import own_address
from proxy.settings.plugins import load_plugin
from proxy.settings.state_folder import make_state_folder
from proxy.store import open_store
from proxy.store.protocol import Store

GC_THRESHOLDS = (50_000, 20, 100)
"""Calls create few reference cycles, and a full collection walks every session's tree. So full
collections are rare, and objects that exist at the start are exempt."""

_log = logging.getLogger(__name__)
Listening = Callable[[ProxyConfig, str, list[Invitation]], None]


async def serve(config: ProxyConfig, listening: Listening) -> None:
    """Runs until SIGINT or SIGTERM. Calls `listening` with the actual configuration, the URL and
    what extras say about it.

    Raises:
        ConfigurationError: the proxy cannot start, or `config` has no admin key.
        EngineError: the proxy's own vLLM did not start, or died.
    """
    raise_limit()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with _engine(config, stop) as with_engine:
        if config.workers > 1:
            store = await open_store(config.store_url, durability=config.durability)
            said = await _invitations(with_engine, store)
            await store.close()
            serve_workers = load_plugin("workers", SEVERAL_PROCESSES, {})
            await serve_workers(with_engine, stop, lambda used, url: listening(used, url, said))
            return
        async with listen(with_engine) as served:
            said = await _invitations(with_engine, served.app[STORE])
            listening(with_engine, served.url, said)
            await stop.wait()
            await withdraw(served.app, config)


class Served(NamedTuple):
    """A proxy that listens."""

    app: web.Application
    url: str
    runner: web.AppRunner


@asynccontextmanager
async def listen(
    config: ProxyConfig, *, own_socket: Path | None = None, siblings: Siblings | None = None
) -> AsyncIterator[Served]:
    """Listens on the port, and on `own_socket` if there is one."""
    app = build_app(_fitting(config), siblings=siblings)
    runner = app_runner(app, handler_cancellation=True)
    await runner.setup()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        if own_socket is not None:
            own_socket.unlink(missing_ok=True)  # left by a process that crashed
            await web.UnixSite(runner, str(own_socket)).start()
        site: web.BaseSite = web.TCPSite(runner, config.host, config.port, backlog=BACKLOG)
        try:
            if config.listen_fd is not None:
                inherited = socket.socket(fileno=config.listen_fd)
                site = web.SockSite(runner, inherited, backlog=BACKLOG)
            await site.start()
        except OSError as error:
            raise unusable_port("port", config.host, config.port, error) from error
        host, port = next(address for address in runner.addresses if len(address) > 1)[:2]
        reached_at = own_address(config, port, str(own_socket) if own_socket else None)
        await app[STORE].announce(reached_at)
        # Another process may have published one when this one did not listen yet.
        await app[CONTROL_PLANE].policies.restore()
        yield Served(app, (config.public_url or http_url(host, port)).rstrip("/"), runner)
    finally:
        await runner.cleanup()


async def withdraw(app: web.Application, config: ProxyConfig) -> None:
    """Releases the sessions, reports not ready, and gives load balancers time to notice."""
    with contextlib.suppress(StoreError):  # the sessions are then released when the process ends
        await app[STORE].announce(None)
    app[CONTROL_PLANE].withdraw()
    await asyncio.sleep(config.limits.unready_s)


@asynccontextmanager
async def _engine(config: ProxyConfig, stop: asyncio.Event) -> AsyncIterator[ProxyConfig]:
    """The configuration with an engine: starts a vLLM if it has none, and no extra by which engines
    join."""
    if config.engines or any(extra.brings_engines for extra in open_extras(config)):
        yield config
        return
    if config.model is None:
        raise ConfigurationError("model is not set; give the folder of the checkpoint to serve")
    vllm = VllmConfig(max_context_tokens=config.max_context_tokens)
    with free_path(make_state_folder() / "vllm.log") as log:
        _log.info("starting vLLM on %s, log in %s", config.model, log)
        async with _started(VllmServer(vllm, config.model, log=log), stop) as url:
            yield config.model_copy(update={"engines": [EngineConfig(url=url)]})


@asynccontextmanager
async def _started(server: VllmServer, stop: asyncio.Event) -> AsyncIterator[str]:
    """The URL of the vLLM, which is started and stopped; its end before that sets `stop`."""
    starting = asyncio.create_task(server.start())
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if stopped.done():
        starting.cancel()
    stopped.cancel()
    await starting
    died = asyncio.create_task(_stop_when_it_dies(server, stop))
    try:
        yield server.url
    finally:
        died.cancel()
        dead = not server.running
        await server.stop()
    if dead:
        raise EngineError(f"vLLM ended: {server.last_words()} (log: {server.log})")


async def _invitations(config: ProxyConfig, store: Store) -> list[Invitation]:
    said = [await extra.invitation(config, store) for extra in open_extras(config)]
    return [each for each in said if each]


async def _stop_when_it_dies(server: VllmServer, stop: asyncio.Event) -> None:
    await server.wait()
    stop.set()


def _fitting(config: ProxyConfig) -> ProxyConfig:
    """The configuration with as many calls in flight as this process can have connections."""
    fitting = calls_that_fit(config.limits.in_flight_calls)
    limits = config.limits.model_copy(update={"in_flight_calls": fitting})
    return config.model_copy(update={"limits": limits})
