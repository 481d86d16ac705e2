"""The run's engines: sends them the weights, and replaces those that end.

Invariant: the proxy sends calls only to engines that serve the trainer's weights: a new engine
receives them before it is added to the proxy, and each version of an adapter is published there as
soon as all engines have it, before any engine is connected again. An engine that ends more than
`engine.restarts` times, at whatever moment, ends the run with the cause in the engine's log. A
replacement that does not start has ended, too.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Protocol

from proxy.client import ProxyClient, ProxyClientError, patiently
from proxy.engines.vllm_server import STOP_GRACE_S
from proxy.errors import EngineError
from proxy.routing.policies import BASE
from proxy.settings.late_section import load_extra
from trainer.algorithms.token_loss import Metrics
from trainer.cluster.cluster import ProxyService, Replica
from trainer.cluster.local_engine import HEALTH_INTERVAL_S, HEALTH_TIMEOUT_S
from trainer.cluster.rank_zero import Connect, FreeMemory, RankZero, SentWeights, SyncWeights
from trainer.errors import TrainerError, WeightSyncError
from trainer.run.control import first_to_end

ENGINE_END_KNOWN_S = HEALTH_INTERVAL_S + HEALTH_TIMEOUT_S + STOP_GRACE_S + 2.0
"""Seconds within which the end of a replica is known after it stops answering: a server whose
engine process has died may have to be found dead, and then to be killed."""


def engine_name(number: int) -> str:
    """The name of a replica in the proxy."""
    return f"engine-{number}"


class PulledWeights(Protocol):
    """Weights that engines pull by themselves. Implementation: the extra `relay`."""

    async def send(self, proxy: ProxyClient, *, needed: bool) -> SentWeights:
        """Publishes the weights, and waits for the engines. `needed`: there are no other ones."""
        ...


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
        proxy_patience_s: float = 0.0,
        run: str = "",
        publish_timeout_s: float | None = None,
        may_share_gpus: bool = False,
    ) -> None:
        """`replicas` were started by the run, and each is restarted at most `restarts` times.
        `given_urls` are engines that the run does not start. `adapters` is the folder for the
        versions of a LoRA adapter. `proxy_patience_s`: how long to wait for a proxy that is being
        restarted. `run`: the run to which the policies that it publishes belong.
        `publish_timeout_s`: how long to wait for relay workers, for which weights are published;
        None: they are not. `may_share_gpus`: a replica may be on the GPU of a rank, which is then
        idle while engines sample, and makes room before a replacement starts. `say` is
        called with a line for the user."""
        self._rank_zero = rank_zero
        self._may_share_gpus = may_share_gpus
        self._replicas = dict(enumerate(replicas))
        self._restarts = restarts
        self._say = say
        self._given_urls = given_urls
        self._adapters = adapters
        self._proxy_patience_s = proxy_patience_s
        self._run = run
        self._published: set[str] = set()
        """Names of the policies that were published; "" are the engines' own weights."""
        self._relay: PulledWeights | None = None
        if publish_timeout_s is not None:
            self._relay = load_extra("trainer.extras.relay.weights:RelayWeights")(
                rank_zero, run, publish_timeout_s, say, patience_s=proxy_patience_s
            )
        self.proxy: ProxyClient | None = None
        """The proxy in which versions of an adapter are published; None before it is started."""
        self._ends: Counter[int] = Counter()
        """How often each replica has ended."""
        self._running: set[int] = set()
        self._changed = asyncio.Condition()
        self._sending = asyncio.Lock()
        """Held from before an engine is connected, or gets weights, until they are published."""

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
        """Connects the trainer to every engine, once the replicas have started. Replicas that end
        meanwhile are started again.

        Raises:
            WeightSyncError: an engine that has not ended cannot receive weights.
            TrainerError: a replica ended more than `restarts` times.
        """
        self._running = set(self._replicas)
        while True:
            try:
                return await self._rank_zero.ask(Connect(self.urls, self._adapters))
            except WeightSyncError as error:
                await self._start_ended(error)

    async def stop(self) -> None:
        """Ends the replicas, and returns when they have ended."""
        await asyncio.gather(*(replica.stop() for replica in self._replicas.values()))

    async def send_weights(self) -> Metrics:
        """Sends the policy's weights to every engine, and repeats this if an engine had ended and
        was replaced. New calls get an adapter's new version from then on.

        Raises:
            WeightSyncError: an engine that has not ended refused the weights.
            ProxyClientError: the proxy refused a version of the adapter, or did not answer within
                `proxy_patience_s`.
        """
        while True:
            try:
                async with self._sending:
                    return await self._send()
            except WeightSyncError as error:
                await self._replaced(error)

    async def _send(self) -> Metrics:
        """Sends the weights, and makes the proxy sample from the new versions of adapters."""
        sent = SentWeights({})
        if self.urls or self._relay is None:
            sent = await self._rank_zero.ask(SyncWeights())
        if self.proxy is None:
            return sent.metrics
        if self._relay is not None:
            self._published.add(BASE.name)
            pulled = await self._relay.send(self.proxy, needed=not self.urls)
            sent = _of_all(sent, pulled)
        for served in sent.served:
            version = served.name, served.version, served.adapter, self._run
            publish = partial(self.proxy.publish_policy, *version)
            await patiently(publish, self._proxy_patience_s)
            self._published.add(served.name)
        return sent.metrics

    async def release_policies(self) -> None:
        """Lets other runs publish the policies of this run, which ends. If the proxy does not
        answer, they still belong to this run."""
        if self.proxy is not None and self._run:
            for name in self._published:
                with suppress(ProxyClientError):
                    await self.proxy.release_policy(name, self._run)

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
        ended = asyncio.create_task(replica.wait())
        try:
            while True:
                self._count(number, await ended)
                await self._note(lambda: self._running.discard(number))
                await proxy.set_engines(self.named)
                await self._change(lambda: client.remove_engine(name), HTTPStatus.NOT_FOUND)
                if self._may_share_gpus:
                    await self._rank_zero.ask(FreeMemory())
                await self._start(number)
                ended = asyncio.create_task(replica.wait())
                if not await self._join(number, ended):
                    continue
                await proxy.set_engines(self.named)
                await self._change(
                    lambda: client.add_engine(replica.url, name=name), HTTPStatus.CONFLICT
                )
        finally:
            ended.cancel()

    def _count(self, number: int, how: str) -> None:
        """Counts and reports an end of a replica.

        Raises:
            TrainerError: it was one too many.
        """
        name = engine_name(number)
        self._ends[number] += 1
        if (ends := self._ends[number]) > self._restarts:
            raise TrainerError(f"{name} ended {ends} times (engine.restarts): {how}")
        self._say(f"warning: {name} ended with {how}; starting another")

    async def _start(self, number: int) -> None:
        """Starts a replica that has ended, again while its start fails."""
        while True:
            try:
                return await self._replicas[number].start()
            except EngineError as error:
                self._count(number, str(error))

    async def _start_ended(self, error: WeightSyncError) -> None:
        """Starts the replicas that have ended; raises `error`, which an engine caused, if none
        has."""
        ends = {asyncio.create_task(self._replicas[n].wait()): n for n in self._replicas}
        if not ends:
            raise error
        try:
            known_s, first = ENGINE_END_KNOWN_S, asyncio.FIRST_COMPLETED
            ended, _ = await asyncio.wait(ends, timeout=known_s, return_when=first)
            if not ended:
                raise error
            for each in ended:
                self._count(ends[each], each.result())
                await self._start(ends[each])
        finally:
            for each in ends:
                each.cancel()

    async def _join(self, number: int, ended: asyncio.Task[str]) -> bool:
        """Connects a replacement and sends it the weights; again without the engines that end
        meanwhile. Returns whether the replacement itself still runs.

        Raises:
            WeightSyncError: an engine that has not ended refused the weights.
        """
        while True:
            running = set(self._running)
            try:
                async with self._sending:
                    urls = [*self.urls, self._replicas[number].url]
                    await self._rank_zero.ask(Connect(urls, self._adapters))
                    await self._send()
                    await self._note(lambda: self._running.add(number))
                return True
            except WeightSyncError:
                fewer = asyncio.create_task(self._other_than(running))
                try:
                    first = asyncio.FIRST_COMPLETED
                    await asyncio.wait(
                        {ended, fewer}, timeout=ENGINE_END_KNOWN_S, return_when=first
                    )
                    if ended.done():
                        return False
                    if not fewer.done():
                        raise
                finally:
                    fewer.cancel()

    async def _other_than(self, running: set[int]) -> None:
        """Returns when other engines run than those."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._running != running)

    async def _change(self, call: Callable[[], Awaitable[None]], made: HTTPStatus) -> None:
        """Changes the proxy's engines. A proxy that was started again with the new list has made
        the change already, and answers with status `made`."""
        try:
            await patiently(call, self._proxy_patience_s)
        except ProxyClientError as error:
            if error.status != made:
                raise

    async def _note(self, change: Callable[[], None]) -> None:
        async with self._changed:
            change()
            self._changed.notify_all()


def _of_all(sent: SentWeights, pulled: SentWeights) -> SentWeights:
    """What the engines with URLs got, and what relay workers pulled: the same versions."""
    metrics = {
        name: max(each[name] for each in (sent.metrics, pulled.metrics) if name in each)
        for name in sent.metrics | pulled.metrics
    }
    return SentWeights(metrics, tuple({*sent.served, *pulled.served}))
