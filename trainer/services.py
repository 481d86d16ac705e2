"""The processes around a run: engines and proxy, started before it and ended after it.

Invariant: leaving `running_services`, by success, error or cancellation, leaves no process behind;
each of them also ends by itself when this process is killed. While it is entered, a proxy that ends
is started again, and an engine that ends is an error of the run, not a hang.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from typing import Any

from proxy.client import ProxyClient
from proxy.engines.vllm_server import VllmOptions, VllmServer
from trainer.config import TrainerConfig
from trainer.errors import ConfigError, TrainerError
from trainer.proxy_process import ProxyProcess, check_port
from trainer.run_control import RunControl
from trainer.run_folder import RunFolder
from trainer.weight_sync.control import EngineControl


@dataclass(frozen=True, slots=True)
class Services:
    proxy: ProxyClient
    engine_urls: tuple[str, ...]


@asynccontextmanager
async def running_services(
    config: TrainerConfig, folder: RunFolder, control: RunControl, tell: Callable[[str], None]
) -> AsyncIterator[Services]:
    """`tell` is called with a line for the user when the proxy had to be started again.

    Raises:
        EngineError, ConfigurationError, TrainerError: one of them could not be started.
    """
    async with AsyncExitStack() as stack:
        if config.proxy_server.url is None:
            check_port(config.proxy_server.host, config.proxy_server.port)
        servers = _servers(config, folder)
        for server in servers:
            stack.push_async_callback(server.stop)
        await control.wait_for(_start(servers))
        urls = config.engine.urls or tuple(server.url for server in servers)
        if config.engine.urls:
            with closing(EngineControl(urls)) as engines:
                await control.wait_for(asyncio.to_thread(engines.check))
        proxy = _proxy(config, folder, urls)
        if isinstance(proxy, ProxyProcess):
            stack.push_async_callback(proxy.stop)
            await control.wait_for(proxy.start())
        client = await stack.enter_async_context(ProxyClient(proxy.url, proxy.admin_key))
        ended = asyncio.create_task(_first_end(servers, proxy, tell))
        stack.push_async_callback(_cancel, ended)
        control.watch(ended)
        yield Services(client, urls)


async def _start(servers: Sequence[VllmServer]) -> None:
    async with asyncio.TaskGroup() as starting:
        for server in servers:
            starting.create_task(server.start())


def _servers(config: TrainerConfig, folder: RunFolder) -> list[VllmServer]:
    engine = config.engine
    if engine.urls:
        return []
    return [
        VllmServer(
            VllmOptions(
                model=config.model.path,
                log=folder.logs / f"engine-{number}.log",
                dtype=config.engine_dtype,
                max_context_tokens=engine.max_context_tokens,
                max_sequences=engine.max_sequences,
                kv_cache_gib=engine.kv_cache_gib,
                gpu_memory_share=engine.gpu_memory_share,
                weight_transfer=json.dumps({"backend": engine.weight_transfer}),
                seed=config.trainer.seed + number,
                extra_args=engine.args,
                environment=engine.env,
                start_timeout_s=engine.start_timeout_s,
            )
        )
        for number in range(engine.replicas)
    ]


@dataclass(frozen=True, slots=True)
class _RunningProxy:
    """A proxy that somebody else started."""

    url: str
    admin_key: str


def _proxy(
    config: TrainerConfig, folder: RunFolder, urls: Sequence[str]
) -> ProxyProcess | _RunningProxy:
    server = config.proxy_server
    if server.url is not None:
        key = os.environ.get("AGENTIC_PROXY_ADMIN_KEY")
        if not key:
            raise ConfigError(
                f"proxy_server.url={server.url!r}: its admin key is not known; "
                "set AGENTIC_PROXY_ADMIN_KEY"
            )
        return _RunningProxy(server.url, key)
    settings: dict[str, Any] = {
        "model": str(config.model.path),
        "engines": [{"url": url} for url in urls],
        "store": f"sqlite:///{folder.sessions.absolute()}",
        "max_context_tokens": config.engine.max_context_tokens,
        "rendering": {"renderer": server.renderer, "template_kwargs": server.template_kwargs},
    }
    return ProxyProcess(server, settings, folder.logs)


async def _first_end(
    servers: Sequence[VllmServer],
    proxy: ProxyProcess | _RunningProxy,
    tell: Callable[[str], None],
) -> None:
    """Until something that the run needs has ended for good; then raises a TrainerError."""
    waits = [asyncio.create_task(_end_of(server)) for server in servers]
    if isinstance(proxy, ProxyProcess):
        waits.append(asyncio.create_task(proxy.keep_running(tell)))
    try:
        if not waits:
            await asyncio.Event().wait()
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        await next(iter(done))
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


async def _end_of(server: VllmServer) -> None:
    code = await server.wait()
    raise TrainerError(
        f"the engine at {server.url} ended with code {code} during the run: "
        f"{server.last_words()} (log: {server.options.log})"
    )


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, TrainerError):
        await task
