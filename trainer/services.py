"""The processes around a run: engines and proxy, started before it and ended after it.

Invariant: leaving `running_services`, by success, error or cancellation, leaves no process behind;
each of them also ends by itself when this process is killed. While it is entered, an engine or a
proxy that ends by itself is an error of the run, not a hang.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from proxy.client import ProxyClient
from proxy.engines.vllm_server import VllmOptions, VllmServer
from trainer.config import TrainerConfig
from trainer.errors import ConfigError, TrainerError
from trainer.proxy_process import ProxyProcess
from trainer.run_control import RunControl
from trainer.run_folder import RunFolder


@dataclass(frozen=True, slots=True)
class Services:
    proxy: ProxyClient
    engine_urls: tuple[str, ...]


@asynccontextmanager
async def running_services(
    config: TrainerConfig, folder: RunFolder, control: RunControl
) -> AsyncIterator[Services]:
    """
    Raises:
        EngineError, ConfigurationError, TrainerError: one of them could not be started.
    """
    async with AsyncExitStack() as stack:
        servers = _servers(config, folder)
        for server in servers:
            stack.push_async_callback(server.stop)
        await control.wait_for(_start(servers))
        urls = config.engine.urls or tuple(server.url for server in servers)
        proxy = _proxy(config, folder, urls)
        if isinstance(proxy, ProxyProcess):
            stack.push_async_callback(proxy.stop)
            await control.wait_for(proxy.start())
        client = await stack.enter_async_context(ProxyClient(proxy.url, proxy.admin_key))
        ended = asyncio.create_task(_first_end(servers, proxy))
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


async def _first_end(servers: Sequence[VllmServer], proxy: ProxyProcess | _RunningProxy) -> None:
    waits = {
        asyncio.create_task(server.wait()): (f"engine at {server.url}", server.options.log)
        for server in servers
    }
    if isinstance(proxy, ProxyProcess):
        waits[asyncio.create_task(proxy.wait())] = (f"proxy at {proxy.url}", proxy.log)
    try:
        if not waits:
            await asyncio.Event().wait()
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        what, log = waits[next(iter(done))]
        raise TrainerError(f"the {what} ended by itself during the run; see {log}")
    finally:
        for wait in waits:
            wait.cancel()


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, TrainerError):
        await task
