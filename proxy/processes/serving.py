"""One proxy process: its engine, where none was given, and its port.

Invariant: it listens only when everything behind the port works, and when it ends, nothing that it
started is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from proxy.app import CONTROL_PLANE, STORE, build_app
from proxy.config import EngineConfig, ProxyConfig
from proxy.engines.vllm_server import VllmOptions, VllmServer
from proxy.errors import ConfigurationError, EngineError, StoreError
from proxy.processes.forwarding import own_address
from proxy.processes.siblings import Siblings
from proxy.processes.workers import serve_workers

GC_THRESHOLDS = (50_000, 20, 100)
"""Calls make little that only the collector can free, and a full collection walks every session's
tree: so rarely, and never what was there at the start."""

_log = logging.getLogger(__name__)


async def serve(config: ProxyConfig, listening: Callable[[ProxyConfig, str], None]) -> None:
    """Until SIGINT or SIGTERM; `listening` is told the configuration in force and the URL.

    Raises:
        ConfigurationError: it cannot start.
        EngineError: the vLLM that it started did not start, or died.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with _engine(config, stop) as with_engine:
        if config.workers > 1:
            await serve_workers(with_engine, stop, listening)
            return
        async with listen(with_engine) as (app, url):
            listening(with_engine, url)
            await stop.wait()
            await withdraw(app, config)


@asynccontextmanager
async def listen(
    config: ProxyConfig, *, own_socket: Path | None = None, siblings: Sequence[Path] = ()
) -> AsyncIterator[tuple[web.Application, str]]:
    """The proxy at its port, and at `own_socket` where it has siblings; yields it and its URL."""
    app = build_app(config, siblings=Siblings(siblings))
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        if own_socket is not None:
            own_socket.unlink(missing_ok=True)  # of a process that died
            await web.UnixSite(runner, str(own_socket)).start()
        site = web.TCPSite(runner, config.host, config.port, reuse_port=own_socket is not None)
        try:
            await site.start()
        except OSError as error:
            raise ConfigurationError(
                f"port: {config.host}:{config.port} cannot be listened on: {error.strerror}; "
                "free it or give another --port"
            ) from error
        host, port = next(address for address in runner.addresses if len(address) > 1)[:2]
        reached_at = own_address(config, port, str(own_socket) if own_socket else None)
        await app[STORE].announce(reached_at)
        yield app, (config.public_url or f"http://{host}:{port}").rstrip("/")
    finally:
        await runner.cleanup()


async def withdraw(app: web.Application, config: ProxyConfig) -> None:
    """Lets go of its sessions, says that it is not ready any more, and leaves balancers the time to
    notice."""
    with contextlib.suppress(StoreError):  # then its sessions are free when it is gone
        await app[STORE].announce(None)
    app[CONTROL_PLANE].withdraw()
    await asyncio.sleep(config.limits.unready_s)


@asynccontextmanager
async def _engine(config: ProxyConfig, stop: asyncio.Event) -> AsyncIterator[ProxyConfig]:
    """The configuration with an engine in it: a vLLM of our own where it names none, and no
    relay's workers may come in."""
    if config.engines or config.relay.token is not None:
        yield config
        return
    if config.model is None:
        raise ConfigurationError("model: give the folder of the checkpoint to serve")
    options = VllmOptions(
        model=config.model,
        log=Path("agentic-proxy-vllm.log"),
        max_context_tokens=config.max_context_tokens,
    )
    server = VllmServer(options)
    _log.info("starting vLLM on %s, log in %s", options.model, options.log)
    starting = asyncio.create_task(server.start())
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if stopped.done():
        starting.cancel()
    stopped.cancel()
    await starting
    died = asyncio.create_task(_stop_when_it_dies(server, stop))
    try:
        yield config.model_copy(update={"engines": [EngineConfig(url=server.url)]})
    finally:
        died.cancel()
        dead = not server.running
        await server.stop()
    if dead:
        raise EngineError(f"vLLM died: {server.last_words()} (log: {options.log})")


async def _stop_when_it_dies(server: VllmServer, stop: asyncio.Event) -> None:
    await server.wait()
    stop.set()
