"""The weights of a relay worker's engine: pulls what the proxy wants, and says what it serves.

Invariant: calls are refused while it is not known that the engine has the weights of one whole
version: from the start of this process until it has loaded the version that the proxy wants, after
an update that failed, and after the engine failed, because it may come back with other weights.
A version is pulled while the engine samples from the one before it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

import msgspec

from proxy.engines.http_engine import FIRST_LABEL
from proxy.errors import EngineError
from proxy.extras.relay.adapter_updates import AdapterUpdates
from proxy.extras.relay.engine_weights import EngineWeights
from proxy.extras.relay.protocol import Serves, Weights
from proxy.extras.relay.weights.publication import Manifest, check_name
from proxy.extras.relay.weights.published_files import PullError, PullStopped
from proxy.extras.relay.weights.pull import LocalWeights, WeightStore

log = logging.getLogger(__name__)

RETRY_S = 5.0
"""Seconds after a failure until the same weights are tried again."""
CHECK_TIMEOUT_S = 30.0
"""Long, because an engine whose machine is overloaded is slow but has its weights."""
CLOSE_S = 60.0
"""Seconds that an update of the engine that has begun gets to finish when the worker ends."""


class WeightUpdates:
    """Example:
    updates = WeightUpdates(engine, store, report)
    updates.want(Weights("run-a/v000012-019e5c41aa07", 12))
    """

    def __init__(
        self,
        engine: EngineWeights,
        store: WeightStore | None,
        report: Callable[[Serves], None],
    ) -> None:
        """`store` is where weights are pulled from; None: the worker has no --weights-url. `report`
        sends a message to the proxy."""
        self._engine = engine
        self._store = store
        self._adapters = None if store is None else AdapterUpdates(engine, store)
        self._report = report
        self._wanted: Weights | None = None
        self._served: Serves | None = None
        """What the engine has; None: unknown, or no whole version."""
        self._doubted: Serves | None = None
        """What it had when it failed."""
        self._problem = ""
        self._task: asyncio.Task[None] | None = None
        self._superseded = asyncio.Event()
        """Set when the update that runs is no longer wanted."""
        self._at_engine = asyncio.Lock()
        """Held while the engine's weights are changed."""
        self._held: dict[bytes, tuple[str | None, ...] | None] = {}
        """Digest of the tensors' names, types and shapes → what `held_dtypes` has returned."""

    @property
    def served(self) -> Serves | None:
        """What the engine serves; None: unknown."""
        return self._served

    @property
    def refusal(self) -> str:
        """Why calls are refused; empty: they are not."""
        if self._wanted is None or self._served is not None:
            return ""
        return self._problem or f"it does not have the weights {self._wanted.publication} yet"

    def want(self, weights: Weights) -> None:
        """Begins to pull and load these weights, unless the engine has them."""
        updating = self._task is not None and not self._task.done()
        if self._wanted == weights and updating:
            return
        self._wanted = weights
        if updating or not self._report_if_served(weights):
            self._start(weights)

    async def held_dtypes(
        self, tensors: Sequence[tuple[str, str, tuple[int, ...]]]
    ) -> tuple[str | None, ...] | None:
        """As `EngineWeights.held_dtypes`; None also if the engine does not answer."""
        try:
            return await self._engine.held_dtypes(tensors)
        except EngineError as error:
            log.warning("relay: the engine's types are not known: %s", error.message)
            return None

    def doubt(self, why: str) -> None:
        """The engine has failed, and may come back with other weights: `check` asks it."""
        if self._served is not None and not self._at_engine.locked():
            self._doubted, self._served, self._problem = self._served, None, why

    def doubt_adapter(self, name: object, why: str) -> None:
        """The engine lacks an adapter: it was restarted, if it is the one that it is to serve."""
        if self._served is not None and self._served.adapter == name:
            self.doubt(why)

    async def check(self, timeout_s: float = CHECK_TIMEOUT_S) -> str:
        """Asks the engine which weights it has. Returns why it must not sample, or "".

        Raises:
            EngineError: it does not answer.
        """
        expected = self._served or self._doubted
        if expected is None or self._at_engine.locked():
            return self.refusal
        found = await self._found(expected, timeout_s)
        if expected is not (self._served or self._doubted) or self._at_engine.locked():
            return self.refusal  # it got new weights meanwhile
        self._doubted = None
        if not found:
            self._served, self._problem = expected, ""
        else:
            self._served = None
            self._problem = f"{found}: it was restarted, and gets its weights again"
            log.warning("relay: %s", self._problem)
            if self._wanted is not None and (self._task is None or self._task.done()):
                self._start(self._wanted)
        return self.refusal

    async def _found(self, expected: Serves, timeout_s: float) -> str:
        """What the engine has instead of what is expected; empty: that. Raises EngineError."""
        label = await self._engine.label(timeout_s)
        wanted = FIRST_LABEL if expected.adapter else str(expected.version)
        if label != wanted:
            return f"the engine has weights {label!r} instead of {wanted!r}"
        if expected.adapter and expected.adapter not in await self._engine.adapters(timeout_s):
            return f"the engine does not have the adapter {expected.adapter}"
        return ""

    async def close(self) -> None:
        """Ends a pull that runs. An update of the engine that has begun finishes."""
        self._superseded.set()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=CLOSE_S)
            self._task.cancel()
        await self._engine.close()

    def _start(self, weights: Weights) -> None:
        self._superseded.set()
        self._superseded = asyncio.Event()
        self._task = asyncio.create_task(self._follow(weights, self._task, self._superseded))

    async def _follow(
        self, weights: Weights, before: asyncio.Task[None] | None, superseded: asyncio.Event
    ) -> None:
        """Tries until the engine has the weights, or others are wanted. `before` is the former
        update, which may be changing the engine's weights."""
        if before is not None:
            await asyncio.wait({before})
            if not superseded.is_set() and self._report_if_served(weights):
                return
        while not superseded.is_set():
            try:
                await self._update(weights, superseded)
                return
            except PullStopped:
                return
            except (PullError, EngineError, ValueError) as error:
                reason = error.message if isinstance(error, EngineError) else str(error)
                self._fail(weights, reason)
            except Exception as error:
                log.exception("relay: the weights %s could not be updated", weights.publication)
                self._fail(weights, f"{type(error).__name__}: {error}")
            try:
                await asyncio.wait_for(superseded.wait(), RETRY_S)
            except TimeoutError:
                continue

    def _report_if_served(self, weights: Weights) -> bool:
        served = self._served
        if served is None or served.publication != weights.publication:
            return False
        self._report(served)
        return True

    def _fail(self, weights: Weights, reason: str) -> None:
        self._problem = f"it does not have the weights {weights.publication}: {reason}"
        log.warning("relay: %s; trying again in %.0f s", self._problem, RETRY_S)
        self._report(Serves(weights.publication, weights.version, error=reason))

    async def _update(self, weights: Weights, superseded: asyncio.Event) -> None:
        """Raises PullError, PullStopped, EngineError, and ValueError for a name of none."""
        name = check_name(weights.publication)
        if self._store is None or self._adapters is None:
            raise PullError(
                "the trainer publishes its weights, and this worker does not know where: give it "
                "as --weights-url the URL at which this machine reaches the trainer's "
                "engine.publish"
            )
        began = time.perf_counter()
        local = await asyncio.to_thread(self._store.pull, name, superseded.is_set)
        pull_s = time.perf_counter() - began
        adapter, held, paused_s = local.manifest.adapter, None, 0.0
        if adapter is None:
            if self._served is None or await self._found(self._served, CHECK_TIMEOUT_S):
                self._held = {}  # it may have been restarted with another --dtype
            held = await self._held_dtypes(local.manifest)
        if superseded.is_set():
            return
        async with self._at_engine:
            if adapter is None:
                paused_s, difference = await self._load(local)
            else:
                difference = await self._adapters.load(local, adapter, superseded.is_set)
            self._served = Serves(
                weights.publication,
                weights.version,
                adapter="" if adapter is None else adapter.name,
                held=held,
                pulled_bytes=local.pulled_bytes,
                pull_s=pull_s,
                paused_s=paused_s,
                difference=difference,
            )
            self._doubted, self._problem = None, ""
        log.info(
            "relay: the engine serves %s: %.1f MiB pulled in %.2f s, paused for %.3f s",
            *(weights.publication, local.pulled_bytes / 2**20, pull_s, paused_s),
        )
        self._report(self._served)

    async def _load(self, local: LocalWeights) -> tuple[float, float | None]:
        assert self._store is not None
        probe = local.manifest.probe
        try:
            paused_s = await self._engine.load(local)
            difference = None if probe is None else await self._engine.difference(probe)
        except EngineError:
            self._served = self._doubted = None
            if not await asyncio.to_thread(self._store.is_whole, local):
                self._store.forget(local.manifest.name)
            raise
        if probe is not None and not (difference or 0.0) <= probe.tolerance:
            self._served = self._doubted = None
            raise EngineError(
                f"the engine does not serve the trainer's weights: mean |Δ log p| is "
                f"{difference:.2e} on the probe, but at most {probe.tolerance:.0e} is expected; "
                "check that it was started with the trainer's model and engine.dtype"
            )
        return paused_s, difference

    async def _held_dtypes(self, manifest: Manifest) -> tuple[str | None, ...] | None:
        """In which types the engine holds the weights.

        Raises:
            EngineError: some were rounded to a type in which this engine does not hold them.
        """
        about = [(each.name, each.trained, each.shape) for each in manifest.tensors]
        key = msgspec.msgpack.encode(about)
        if key not in self._held:
            self._held = {key: await self._engine.held_dtypes(about)}
        held = self._held[key]
        for tensor, dtype in zip(manifest.tensors, held or (), strict=held is not None):
            if tensor.dtype != tensor.trained and dtype not in (None, tensor.dtype):
                raise EngineError(
                    f"{tensor.name} was published in {tensor.dtype}, in which the run's engines "
                    f"hold it, and this engine holds it in {dtype}; start it with the same --dtype "
                    "as the others"
                )
        return held
