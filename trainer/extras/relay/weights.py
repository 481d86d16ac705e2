"""Makes the run's relay workers serve each version of the weights, or of the adapter.

Invariant: when `send` returns, the proxy gives calls only to workers that serve the published
weights. The others get none until they do, and the user is told why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from proxy.client import ProxyClient, patiently
from trainer.algorithms.token_loss import Metrics
from trainer.cluster.rank_zero import DescribeWeights, PublishWeights, RankZero, SentWeights
from trainer.errors import WeightSyncError
from trainer.weight_sync.dtypes import Report
from trainer.weight_sync.published import Published

WAIT_S = 20.0
"""Seconds for which a request waits for workers; below the time limits of most HTTP proxies."""


class RelayWeights:
    """Example: metrics = await RelayWeights(rank_zero, "run-a", 600.0, print).send(proxy)"""

    def __init__(
        self,
        rank_zero: RankZero,
        run: str,
        timeout_s: float,
        say: Callable[[str], None],
        *,
        patience_s: float = 0.0,
    ) -> None:
        """`timeout_s`: how long to wait for workers. `patience_s`: how long to wait for a proxy
        that is being restarted. `say` is called with a line for the user."""
        self._rank_zero = rank_zero
        self._run = run
        self._timeout_s = timeout_s
        self._say = say
        self._patience_s = patience_s
        self._held: tuple[Report, ...] = ()

    async def send(self, proxy: ProxyClient, *, needed: bool) -> SentWeights:
        """Publishes the weights, and waits for the workers. `needed`: there are no other engines.

        Raises:
            WeightSyncError: the weights could not be published; or, if they are `needed`, no worker
                serves them.
            ProxyClientError: the proxy has no relay, its weights belong to another run, or it did
                not answer in time.
        """
        if not self._held:
            self._held = await self._reported(proxy)
        sent = await self._rank_zero.ask(PublishWeights(self._run, self._held))
        new = {"publication": sent.name, "version": sent.version, "run": self._run}
        publish = partial(proxy.publish_weights, **new, patience_s=self._timeout_s)
        await patiently(publish, self._patience_s)
        view = await self._settled(proxy, sent, needed)
        workers: list[Mapping[str, Any]] = view["workers"]
        serving = [each for each in workers if each["serves_wanted"]]
        for each in workers:
            if not each["serves_wanted"]:
                self._say(
                    f"warning: relay worker {each['name']} gets no calls until it has version "
                    f"{sent.version}: {_why(each)}"
                )
        self._held = _known(view["held_dtypes"])
        return SentWeights(_metrics(sent, serving), (sent.served,) if sent.served else ())

    async def _reported(self, proxy: ProxyClient) -> tuple[Report, ...]:
        """What the engines of workers that are connected report before anything is published."""
        tensors = await self._rank_zero.ask(DescribeWeights())
        if not tensors:
            return ()
        types = await patiently(partial(proxy.held_types, tensors), self._patience_s)
        return _known(types["held_dtypes"])

    async def _settled(
        self, proxy: ProxyClient, sent: Published, needed: bool
    ) -> Mapping[str, Any]:
        """The proxy's `WeightsView` when all workers have the weights or have failed, and if they
        are `needed`, one has them."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        while True:
            left_s = max(0.0, deadline - loop.time())
            view = await patiently(partial(proxy.weights, min(left_s, WAIT_S)), self._patience_s)
            workers: list[Mapping[str, Any]] = view["workers"]
            has_some = any(each["serves_wanted"] for each in workers)
            if (view["settled"] and has_some) or (not needed and (view["settled"] or not workers)):
                return view
            if loop.time() >= deadline:
                break
            if view["settled"]:  # all have failed, and try again
                await asyncio.sleep(1.0)
        if has_some or not needed:
            return view
        found = "; ".join(f"{each['name']}: {_why(each)}" for each in workers)
        raise WeightSyncError(
            f"no relay worker serves version {sent.version} after {self._timeout_s:g} s "
            f"(engine.publish_timeout_s): {found or 'none is connected'}"
        )


def _known(reports: list[Any]) -> tuple[Report, ...]:
    """Empty if an engine cannot report its types: weights are then published as trained."""
    return () if None in reports else tuple(reports)


def _why(worker: Mapping[str, Any]) -> str:
    return str(worker["error"] or "it is still loading them")


def _metrics(sent: Published, serving: list[Mapping[str, Any]]) -> Metrics:
    """`sync/…` of the slowest worker."""
    metrics = {
        "sync/bytes": float(sent.full_bytes + sent.delta_bytes),
        "sync/delta_bytes": float(sent.delta_bytes),
    }
    names = {"pull_s": "pull_s", "paused_s": "paused_s", "difference": "probe_abs_mean"}
    for key, name in names.items():
        found = [each[key] for each in serving if each[key] is not None]
        if found:
            metrics[f"sync/{name}"] = max(found)
    return metrics
