"""The run's engines: sends them the weights, and replaces those that end.

Invariant: the proxy sends calls only to engines that serve the trainer's weights: a new engine
receives them before it is added to the proxy, and a new version of an adapter is published there
when all engines have it. An engine that ends more than `engine.restarts`
times ends the run, with the last line of the engine's log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from proxy.client import ProxyClient
from trainer.algorithms.token_loss import Metrics
from trainer.cluster.cluster import ProxyService, Replica
from trainer.cluster.rank_zero import Connect, RankZero, Served, SyncWeights
from trainer.errors import TrainerError, WeightSyncError
from trainer.run.control import first_to_end

ENGINE_END_KNOWN_S = 5.0
"""Seconds within which the end of an engine's process is known after it stops answering."""


def engine_name(number: int) -> str:
    """The name of a replica in the proxy."""
    return f"engine-{number}"


class RunEngines:
    """Example:
    engines = RunEngines(rank_zero, replicas, restarts=3, say=print)
    await engines.connect()
    await engines.send_weights()
    await engines.keep_running(proxy, client)
    """

    def __init__(
        self,
        rank_zero: RankZero,
        replicas: Sequence[Replica] = (),
        *,
        restarts: int = 0,
        say: Callable[[str], None] = lambda _: None,
        given_urls: Sequence[str] = (),
        adapters: Path | None = None,
    ) -> None:
        """`replicas` were started by the run, and each is restarted at most `restarts` times.
        `given_urls` are engines that the run does not start. `adapters` is the folder for the
        versions of a LoRA adapter. `say` is called with a line for the
        user."""
        self._rank_zero = rank_zero
        self._replicas = dict(enumerate(replicas))
        self._restarts = restarts
        self._say = say
        self._given_urls = given_urls
        self._adapters = adapters
        self.proxy: ProxyClient | None = None
        """The proxy in which versions of an adapter are published; None before it is started."""
        self._running: set[int] = set()
        self._changed = asyncio.Condition()
        self._joining = asyncio.Lock()

    @property
    def urls(self) -> list[str]:
        """The URLs of the engines that run."""
        return [*self._given_urls, *(self._replicas[n].url for n in sorted(self._running))]

    @property
    def named(self) -> list[dict[str, str]]:
        """The running engines, each as the keys of a `proxy.config.EngineConfig`; those that the
        run started have names."""
        given = [{"url": url} for url in self._given_urls]
        ours = sorted(self._running)
        return given + [{"url": self._replicas[n].url, "name": engine_name(n)} for n in ours]

    async def connect(self) -> None:
        """Connects the trainer to every engine, once the replicas have started."""
        self._running = set(self._replicas)
        await self._rank_zero.ask(Connect(self.urls, self._adapters))

    async def stop(self) -> None:
        """Ends the replicas, and returns when they have ended."""
        await asyncio.gather(*(replica.stop() for replica in self._replicas.values()))

    async def send_weights(self) -> Metrics:
        """Sends the policy's weights to every engine, and repeats this if an engine had ended and
        was replaced. New calls get an adapter's new version from then on.

        Raises:
            WeightSyncError: an engine that has not ended refused the weights.
        """
        while True:
            try:
                metrics = await self._rank_zero.ask(SyncWeights())
                await self._publish()
                return metrics
            except WeightSyncError as error:
                await self._replaced(error)

    async def _publish(self) -> None:
        """Makes the proxy sample from the last version of the adapter, if there is one."""
        if self.proxy is None:
            return
        served = await self._rank_zero.ask(Served())
        if served is not None:
            await self.proxy.publish_policy(served.name, served.version, served.adapter)

    async def keep_running(self, proxy: ProxyService, client: ProxyClient) -> None:
        """Replaces every replica that ends. Never returns; ends by cancellation or an error.

        Raises:
            TrainerError: a replica ended more than `restarts` times, or did not start again.
        """
        await first_to_end(self._keep(number, proxy, client) for number in self._replicas)

    async def _replaced(self, error: WeightSyncError) -> None:
        """Returns when the replicas that have ended are replaced. If no replica has ended, raises
        `error`, with which an engine refused an update."""
        async with self._changed:
            try:
                async with asyncio.timeout(ENGINE_END_KNOWN_S if self._replicas else 0):
                    await self._changed.wait_for(lambda: len(self._running) < len(self._replicas))
            except TimeoutError:
                raise error from None
            await self._changed.wait_for(lambda: len(self._running) == len(self._replicas))

    async def _keep(self, number: int, proxy: ProxyService, client: ProxyClient) -> None:
        replica, name = self._replicas[number], engine_name(number)
        for restart in range(self._restarts + 1):
            how = await replica.wait()
            if restart == self._restarts:
                break
            self._say(f"warning: {name} ended with {how}; starting another")
            await self._note(lambda: self._running.discard(number))
            await proxy.set_engines(self.named)
            await client.remove_engine(name)
            await replica.start()
            async with self._joining:
                await self._rank_zero.ask(Connect([*self.urls, replica.url], self._adapters))
                await self._rank_zero.ask(SyncWeights())
                await self._note(lambda: self._running.add(number))
            await proxy.set_engines(self.named)
            await client.add_engine(replica.url, name=name)
        raise TrainerError(f"{name} ended {self._restarts + 1} times (engine.restarts): {how}")

    async def _note(self, change: Callable[[], None]) -> None:
        async with self._changed:
            change()
            self._changed.notify_all()
