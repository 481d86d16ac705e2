"""The processes around a run: engines and proxy, started before it and ended after it.

Invariant: after the exit of `RunServices.running`, by success, error or cancellation, no process is
left; each process also ends by itself when this process is killed. Within the context, a proxy or
an engine that ends is started again; if it keeps ending, the run ends with an error.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from typing import Any

from proxy.admin_key import client_key
from proxy.client import ProxyClient
from proxy.extra_registry import PAGE_LINKS
from proxy.machine.port import usable_port
from proxy.settings.late_section import load_extra
from proxy.store import open_store
from trainer.cluster.cluster import Cluster, JoiningEngines, ProxyService, joining_engines
from trainer.cluster.config import ProcessesConfig
from trainer.cluster.engines import RunEngines
from trainer.cluster.proxy_server import PORT_SETTING
from trainer.cluster.rank_zero import FreeMemory, RankZero
from trainer.cluster.starting import StartingEngines
from trainer.errors import ConfigError, TrainerError
from trainer.run.control import RunControl, first_to_end
from trainer.run.folder import RunFolder
from trainer.weight_sync.control import EngineControl

MAX_PROXY_ENDS = 5
"""Number of ends of the proxy after which the run ends with an error."""


@dataclass(frozen=True, slots=True)
class Services:
    """The access of a run to the processes around it."""

    engines: RunEngines
    proxy: ProxyClient
    """The proxy's control plane."""
    page: str | None = None
    """What is said of the run's page; None without a page, or for a proxy of others."""


@dataclass(frozen=True, slots=True)
class RunServices:
    """The engines and the proxy of a run.

    Example:
    around = RunServices(config, folder, control, cluster, rank_zero, print)
    async with around.running() as services:
        await services.engines.send_weights()
    """

    config: ProcessesConfig
    folder: RunFolder
    control: RunControl
    cluster: Cluster
    rank_zero: RankZero
    say: Callable[[str], None]
    """Called with a line for the user whenever a process had to be started again."""

    starting: StartingEngines | None = None
    """The replicas, which may start already; None: `running` starts them."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Services]:
        """Starts engines and proxy and connects the trainer to the engines.

        Raises:
            EngineError, ConfigurationError, TrainerError: one of them could not be started.
        """
        server = self.config.proxy_server
        async with AsyncExitStack() as stack:
            if server.url is None:
                usable_port(PORT_SETTING, server.host, server.port)
            engines, starting = await self._begin_engines(stack)
            workers = joining_engines(self.config, self.folder, self.cluster, self.say)
            proxy = await self._begin_proxy(stack, workers) if server.url is None else None
            await self.rank_zero.ask(FreeMemory())
            await starting.ready()
            await self.control.wait_for(engines.connect())
            if server.url is not None:
                key = _admin_key(server.url)
                engines.proxy = await stack.enter_async_context(ProxyClient(server.url, key))
                stack.push_async_callback(engines.release_policies)
                await _check_images(engines.proxy, self.config.model.vision)
                yield Services(engines, engines.proxy)
                return
            assert proxy is not None
            await proxy.set_engines(engines.named)
            await self.control.wait_for(proxy.start())
            client = await stack.enter_async_context(ProxyClient(proxy.url, proxy.admin_key))
            engines.proxy = client
            await _check_images(client, self.config.model.vision)
            ended = asyncio.create_task(_keep_running(engines, proxy, client, self.say))
            stack.push_async_callback(_cancel, ended)
            self.control.watch(ended)
            stack.push_async_callback(workers.stop)
            await self.control.wait_for(workers.start(proxy.url, client))
            if workers.lives is not None:
                self.control.watch(workers.lives)
            yield Services(engines, client, await _said_link(self.folder, proxy.url))

    async def _begin_engines(self, stack: AsyncExitStack) -> tuple[RunEngines, StartingEngines]:
        """The run's engines, whose replicas may still start."""
        engine, wait_for = self.config.engine, self.control.wait_for
        adapters = self.folder.path.absolute() / "adapters"
        if engine.urls:
            with closing(EngineControl(engine.urls)) as running:
                await wait_for(asyncio.to_thread(running.check))
        starting = self.starting
        if starting is None:
            alone = StartingEngines(self.cluster, engine, self.control)
            starting = await stack.enter_async_context(alone)
        engines = RunEngines(
            self.rank_zero,
            starting.replicas,
            restarts=engine.restarts,
            say=self.say,
            given_urls=engine.urls,
            adapters=adapters,
            proxy_patience_s=self.config.proxy_server.patience_s,
            run=self.folder.run_id,
            publish_timeout_s=engine.publish_timeout_s if engine.publish else None,
            may_share_gpus=self.config.trainer.mode == "colocated",
        )
        stack.push_async_callback(engines.stop)
        return engines, starting

    async def _begin_proxy(self, stack: AsyncExitStack, workers: JoiningEngines) -> ProxyService:
        """The proxy, which imports while the engines start."""
        config, server = self.config, self.config.proxy_server
        settings: dict[str, Any] = {
            "model": str(config.model.path),
            "store": f"sqlite:///{self.folder.sessions.absolute()}",
            "max_context_tokens": config.engine.max_context_tokens,
            "retention": config.retention.model_dump(),
            "telemetry": config.telemetry and config.telemetry.model_dump(),
            "run": str(self.folder.path.absolute()),
            "tools": server.tools.model_dump(),
            "rules": [rule.model_dump(mode="json") for rule in server.rules],
            "rendering": {
                "renderer": server.renderer,
                "template_kwargs": server.template_kwargs,
                "images": server.images and config.model.vision != "text",
            },
            **workers.proxy_settings,
        }
        proxy = self.cluster.proxy(settings)
        stack.push_async_callback(proxy.stop)
        await proxy.begin()
        return proxy


async def _check_images(client: ProxyClient, vision: str) -> None:
    """
    Raises:
        ConfigError: images are trained, but an engine would get a text in their place.
    """
    for engine in await client.engines() if vision != "text" else ():
        if engine["healthy"] and not engine["images"]:
            raise ConfigError(
                f"model.vision={vision}: the engine {engine['url']} prepares no images; it needs "
                "torchvision and the checkpoint's processor (its log says what is missing), and "
                "proxy_server.images=true"
            )


async def _said_link(folder: RunFolder, url: str) -> str | None:
    """What is said of a link that opens the run's page once; None without a page."""
    if PAGE_LINKS is None:
        return None
    store = await open_store(f"sqlite:///{folder.sessions.absolute()}")
    try:
        secret = await load_extra(f"{PAGE_LINKS}:new_link")(store.browser)
        said_link = load_extra(f"{PAGE_LINKS}:said_link")
        said: str = said_link(url, secret, folder.path.absolute() / "page.link")
        return said
    finally:
        await store.close()


def _admin_key(url: str) -> str:
    """The admin key of a proxy that the run did not start.

    Raises:
        ConfigError: it is neither in the environment nor in the proxy's file.
    """
    key = client_key(url)
    if key is None:
        raise ConfigError(
            f"proxy_server.url={url!r}: its admin key is missing; set AGENTIC_PROXY_ADMIN_KEY "
            "to the key, or AGENTIC_PROXY_ADMIN_KEY_FILE to a file with it (`agentic-proxy serve` "
            "prints which file it is in)"
        )
    return key


async def _keep_running(
    engines: RunEngines, proxy: ProxyService, client: ProxyClient, say: Callable[[str], None]
) -> None:
    """Restarts what ends. Never returns, but raises a TrainerError when a process keeps ending."""
    keeping: list[Coroutine[Any, Any, None]] = [
        _keep_proxy_running(proxy, say),
        engines.keep_running(proxy, client),
    ]
    await first_to_end(keeping)


async def _keep_proxy_running(proxy: ProxyService, say: Callable[[str], None]) -> None:
    """Restarts the proxy whenever it ends. Nothing is lost, because all of its state is in its
    store and agents retry."""
    for restart in range(1, MAX_PROXY_ENDS + 1):
        how = await proxy.wait()
        if restart < MAX_PROXY_ENDS:
            say(f"warning: the proxy ended with {how}; starting it again")
            await proxy.start()
    raise TrainerError(f"the proxy ended {MAX_PROXY_ENDS} times, with {how}")


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, TrainerError):
        await task
