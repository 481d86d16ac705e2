"""The processes around a run: engines and proxy, started before it and ended after it.

Invariant: leaving `running_services`, by success, error or cancellation, leaves no process behind;
each of them also ends by itself when this process is killed. While it is entered, a proxy or an
engine that ends is started again, and one that keeps ending is an error of the run, not a hang.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from typing import Any

from proxy.client import ProxyClient
from trainer.cluster.engines import Engines
from trainer.cluster.protocol import Cluster, Proxy
from trainer.cluster.trainer import Trainer
from trainer.config import TrainerConfig
from trainer.errors import ConfigError, TrainerError
from trainer.run.control import RunControl, first_to_end
from trainer.run.folder import RunFolder
from trainer.run.proxy_process import check_port
from trainer.weight_sync.control import EngineControl

MAX_PROXY_ENDS = 5
"""A proxy that keeps dying is a fault to be shown, not to be hidden."""


@asynccontextmanager
async def running_services(
    config: TrainerConfig,
    folder: RunFolder,
    control: RunControl,
    cluster: Cluster,
    trainer: Trainer,
    tell: Callable[[str], None],
) -> AsyncIterator[ProxyClient]:
    """The proxy's control plane; the trainer has its engines. `tell` is called with a line for the
    user when something had to be started again.

    Raises:
        EngineError, ConfigurationError, TrainerError: one of them could not be started.
    """
    async with AsyncExitStack() as stack:
        if config.proxy_server.url is None:
            check_port(config.proxy_server.host, config.proxy_server.port)
        engines = await _start_engines(config, control, cluster, stack)
        urls = config.engine.urls if engines is None else engines.urls
        served = [{"url": url} for url in urls] if engines is None else engines.named
        if engines is not None:
            trainer.recover = engines.recover
        await control.wait_for(trainer.connect(urls))
        proxy = await _start_proxy(config, folder, control, cluster, served, stack)
        url, key = (proxy.url, proxy.admin_key) if proxy else _running_proxy(config)
        client = await stack.enter_async_context(ProxyClient(url, key))
        ended = asyncio.create_task(_keep_running(engines, proxy, client, trainer, tell))
        stack.push_async_callback(_cancel, ended)
        control.watch(ended)
        yield client


async def _start_engines(
    config: TrainerConfig, control: RunControl, cluster: Cluster, stack: AsyncExitStack
) -> Engines | None:
    if config.engine.urls:
        with closing(EngineControl(config.engine.urls)) as running:
            await control.wait_for(asyncio.to_thread(running.check))
        return None
    replicas = [cluster.replica(number) for number in range(config.engine.replicas)]
    engines = Engines(replicas, restarts=config.engine.restarts)
    stack.push_async_callback(engines.stop)
    await control.wait_for(engines.start())
    return engines


async def _start_proxy(
    config: TrainerConfig,
    folder: RunFolder,
    control: RunControl,
    cluster: Cluster,
    engines: Sequence[dict[str, str]],
    stack: AsyncExitStack,
) -> Proxy | None:
    server = config.proxy_server
    if server.url is not None:
        return None
    settings: dict[str, Any] = {
        "model": str(config.model.path),
        "store": f"sqlite:///{folder.sessions.absolute()}",
        "max_context_tokens": config.engine.max_context_tokens,
        "rendering": {"renderer": server.renderer, "template_kwargs": server.template_kwargs},
    }
    proxy = cluster.proxy(settings)
    await proxy.set_engines(engines)
    stack.push_async_callback(proxy.stop)
    await control.wait_for(proxy.start())
    return proxy


def _running_proxy(config: TrainerConfig) -> tuple[str, str]:
    """URL and admin key of a proxy that somebody else started."""
    url, key = config.proxy_server.url, os.environ.get("AGENTIC_PROXY_ADMIN_KEY")
    if not url or not key:
        raise ConfigError(
            f"proxy_server.url={url!r}: its admin key is not known; set AGENTIC_PROXY_ADMIN_KEY"
        )
    return url, key


async def _keep_running(
    engines: Engines | None,
    proxy: Proxy | None,
    client: ProxyClient,
    trainer: Trainer,
    tell: Callable[[str], None],
) -> None:
    """Until something that the run needs has ended for good; then raises a TrainerError."""
    keeping: list[Coroutine[Any, Any, None]] = []
    if proxy is not None:
        keeping.append(_keep_proxy_running(proxy, tell))
    if engines is not None and proxy is not None:
        keeping.append(engines.keep_running(proxy, client, trainer, tell))
    await first_to_end(keeping)


async def _keep_proxy_running(proxy: Proxy, tell: Callable[[str], None]) -> None:
    """Starts it anew whenever it ends: its store has all that it knew, and agents call again."""
    for restart in range(1, MAX_PROXY_ENDS + 1):
        how = await proxy.wait()
        if restart < MAX_PROXY_ENDS:
            tell(f"warning: the proxy ended with {how}; starting it again")
            await proxy.start()
    raise TrainerError(f"the proxy ended {MAX_PROXY_ENDS} times, with {how}")


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, TrainerError):
        await task
