"""Loads published adapters into a relay worker's engine, which goes on sampling.

Invariant: when `load` returns, the engine serves exactly this version of the adapter, on the
weights to which it belongs: they are compared with the trainer's before the first adapter that an
engine gets. The version before it stays loaded for calls that still name it; older ones get no new
calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from proxy.engines.http_engine import FIRST_LABEL
from proxy.errors import EngineError
from proxy.extras.relay.engine_weights import EngineWeights
from proxy.extras.relay.weights.publication import Adapter, ProbeScores
from proxy.extras.relay.weights.pull import LocalWeights, WeightStore


class AdapterUpdates:
    """Example: difference = await AdapterUpdates(engine, store).load(local, adapter, stopped)"""

    def __init__(self, engine: EngineWeights, store: WeightStore) -> None:
        self._engine = engine
        self._store = store
        self._last = ""
        """The adapter that the engine got last from this process."""
        self._tested: str | None = ""
        """By which publication the engine was tested."""

    async def load(
        self, local: LocalWeights, adapter: Adapter, stopped: Callable[[], bool]
    ) -> float | None:
        """Returns the mean |Δ log p| of engine and trainer on the probe, if there is one.

        Raises:
            EngineError: the engine has other weights than the adapter belongs to, refused the
                adapter, or does not serve it exactly.
            PullError, PullStopped: the random adapter could not be pulled.
        """
        loaded = await self._engine.adapters()
        if self._last not in loaded or self._tested != adapter.check:
            await self._test(adapter, stopped)
        difference = await self._loaded(local, adapter, local.manifest.probe)
        self._last, self._tested = adapter.name, adapter.check
        newest = self._store.adapters.newest(adapter)
        await self._engine.unload_adapters(
            lambda name: name.startswith(f"{adapter.policy}@") and name not in newest
        )
        return difference

    async def _test(self, adapter: Adapter, stopped: Callable[[], bool]) -> None:
        """Compares the engine with the trainer on the weights without an adapter, and on a random
        adapter: a new one changes nothing, so that an engine which ignores it would pass."""
        label = await self._engine.label()
        if label != FIRST_LABEL:
            raise EngineError(
                f"the adapter {adapter.name} belongs to the weights with which the engine was "
                f"started, and the engine got the weights {label!r} since; restart it"
            )
        if adapter.base is not None:
            difference = await self._engine.difference(adapter.base)
            if not difference <= adapter.base.tolerance:
                raise EngineError(
                    f"the engine has other weights than those to which the adapter {adapter.name} "
                    f"belongs: mean |Δ log p| is {difference:.2e} on the probe, but at most "
                    f"{adapter.base.tolerance:.0e} is expected; start it with the checkpoint that "
                    "the trainer has as model.path, and with engine.dtype"
                )
        if adapter.check is not None:
            local = await asyncio.to_thread(self._store.pull, adapter.check, stopped)
            random = local.manifest.adapter
            assert random is not None
            try:
                await self._loaded(local, random, local.manifest.probe)
            finally:
                await self._engine.unload_adapters(lambda name: name == random.name)
                self._store.adapters.forget(random)

    async def _loaded(
        self, local: LocalWeights, adapter: Adapter, probe: ProbeScores | None
    ) -> float | None:
        await self._engine.load_adapter(adapter.name, local.path)
        if probe is None:
            return None
        difference = await self._engine.difference(probe, adapter.name)
        if not difference <= probe.tolerance:
            await self._engine.unload_adapters(lambda name: name == adapter.name)
            raise EngineError(
                f"the engine does not serve the adapter {adapter.name} as the trainer does: mean "
                f"|Δ log p| is {difference:.2e} on the probe, but at most {probe.tolerance:.0e} is "
                "expected; set model.lora.update=merged, or choose other model.lora.target_modules"
            )
        return difference
