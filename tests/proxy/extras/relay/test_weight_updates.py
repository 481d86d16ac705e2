"""Which weights an engine has in the end, with an engine and a store of the test's own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from proxy.extras.relay.protocol import Serves, Weights
from proxy.extras.relay.weight_updates import WeightUpdates
from proxy.extras.relay.weights.published_files import PullStopped

OLD, NEW = Weights("run-a/v000001-000000000001", 1), Weights("run-a/v000002-000000000002", 2)


class Held:
    """An engine and a store in one, whose work for `NEW` waits for `go_on` in `stage`."""

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self.loop = asyncio.get_running_loop()
        self.begun = asyncio.Event()
        self.go_on = threading.Event()
        self.serves = 0

    def pull(self, name: str, stopped: Callable[[], bool]) -> Any:
        version = int(name.partition("/v")[2][:6])
        self._hold("pull", version)
        if stopped():
            raise PullStopped
        manifest = SimpleNamespace(adapter=None, probe=None, tensors=(), version=version)
        return SimpleNamespace(manifest=manifest, pulled_bytes=0)

    async def load(self, local: Any) -> float:
        await asyncio.to_thread(self._hold, "load", local.manifest.version)
        self.serves = local.manifest.version
        return 0.0

    async def label(self, timeout_s: float) -> str:
        return str(self.serves)

    async def held_dtypes(self, about: Any) -> None: ...

    async def close(self) -> None: ...

    def _hold(self, stage: str, version: int) -> None:
        if (stage, version) == (self.stage, NEW.version):
            self.loop.call_soon_threadsafe(self.begun.set)
            assert self.go_on.wait(20)


@pytest.mark.parametrize("stage", ["pull", "load"])
async def test_weights_that_are_wanted_again_during_an_update_to_others_stay(stage: str) -> None:
    held, reports = Held(stage), asyncio.Queue[Serves]()
    updates = WeightUpdates(cast(Any, held), cast(Any, held), reports.put_nowait)
    async with asyncio.timeout(20):
        updates.want(OLD)
        assert (await reports.get()).publication == OLD.publication
        updates.want(NEW)
        await held.begun.wait()
        updates.want(OLD)
        held.go_on.set()
        while (await reports.get()).publication != OLD.publication:
            pass
        assert updates._task is not None
        await asyncio.wait({updates._task})
        await updates.close()
    assert updates.served is not None
    assert (updates.served.publication, held.serves) == (OLD.publication, OLD.version)
