"""The run's engines: started together, and each started anew when it ends.

Invariant: the proxy sends calls only to an engine that serves the trainer's weights: a new one gets
them before the proxy is told of it. An engine that keeps ending is a fault to be shown: after
`engine.restarts` the run ends with its last words.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from proxy.client import ProxyClient
from trainer.cluster.protocol import Proxy, Replica
from trainer.cluster.trainer import Trainer
from trainer.errors import TrainerError, WeightSyncError
from trainer.run.control import first_to_end

NEWS_S = 5.0
"""Until the end of an engine that no longer answers is known."""


def engine_name(number: int) -> str:
    """What the proxy calls a replica."""
    return f"engine-{number}"


class Engines:
    """Example:
    engines = Engines(replicas, restarts=3)
    await engines.start()
    await engines.keep_running(proxy, client, trainer, tell)
    """

    def __init__(self, replicas: Sequence[Replica], *, restarts: int) -> None:
        """`restarts`: of each, over the run."""
        self._replicas = dict(enumerate(replicas))
        self._restarts = restarts
        self._running: set[int] = set()
        self._changed = asyncio.Condition()
        self._joining = asyncio.Lock()

    @property
    def urls(self) -> list[str]:
        """Of those that run."""
        return [self._replicas[number].url for number in sorted(self._running)]

    @property
    def named(self) -> list[dict[str, str]]:
        """The same for the proxy, under the names that it knows them by."""
        names = map(engine_name, sorted(self._running))
        return [{"url": url, "name": name} for url, name in zip(self.urls, names, strict=True)]

    async def start(self) -> None:
        """
        Raises:
            EngineError, TrainerError: one could not be started.
        """
        async with asyncio.TaskGroup() as starting:
            for replica in self._replicas.values():
                starting.create_task(replica.start())
        self._running = set(self._replicas)

    async def stop(self) -> None:
        """Returns when every one of them is gone."""
        await asyncio.gather(*(replica.stop() for replica in self._replicas.values()))

    async def keep_running(
        self,
        proxy: Proxy,
        client: ProxyClient,
        trainer: Trainer,
        tell: Callable[[str], None],
    ) -> None:
        """Until one ends for good.

        Raises:
            TrainerError: one ended more than `restarts` times, or did not start again.
        """
        await first_to_end(
            self._keep(number, proxy, client, trainer, tell) for number in self._replicas
        )

    async def recover(self, error: WeightSyncError) -> None:
        """Returns when engines that ended, and so refused an update, are replaced.

        Raises:
            WeightSyncError: `error`: none has ended.
        """
        async with self._changed:
            try:
                async with asyncio.timeout(NEWS_S):
                    await self._changed.wait_for(lambda: len(self._running) < len(self._replicas))
            except TimeoutError:
                raise error from None
            await self._changed.wait_for(lambda: len(self._running) == len(self._replicas))

    async def _keep(
        self,
        number: int,
        proxy: Proxy,
        client: ProxyClient,
        trainer: Trainer,
        tell: Callable[[str], None],
    ) -> None:
        replica, name = self._replicas[number], engine_name(number)
        for restart in range(self._restarts + 1):
            how = await replica.wait()
            if restart == self._restarts:
                break
            tell(f"warning: {name} ended with {how}; starting another")
            await self._note(lambda: self._running.discard(number))
            await proxy.set_engines(self.named)
            await client.remove_engine(name)
            await replica.start()
            async with self._joining:
                await trainer.use_engines([*self.urls, replica.url])
                await self._note(lambda: self._running.add(number))
            await proxy.set_engines(self.named)
            await client.add_engine(replica.url, name=name)
        raise TrainerError(f"{name} ended {self._restarts + 1} times (engine.restarts): {how}")

    async def _note(self, change: Callable[[], None]) -> None:
        async with self._changed:
            change()
            self._changed.notify_all()
