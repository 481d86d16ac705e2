"""The control plane of published weights: which ones every relay worker is to serve.

Invariant: they are recorded in the store as the version of the policy without a name, so that a
proxy that is started again, or another one on the store, makes its workers serve them. A run's
weights are replaced by another run only after it has released them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from aiohttp import web

from proxy.control.schema import parsed
from proxy.errors import SessionError
from proxy.extras.relay.engine import RelayEngine
from proxy.extras.relay.hub import RelayHub
from proxy.extras.relay.protocol import Weights
from proxy.extras.relay.weights_schema import (
    PATIENCE_S,
    HeldTypes,
    NewWeights,
    TensorsView,
    WeightsView,
)
from proxy.extras.several_processes.other_proxies import ask_others
from proxy.http.openapi import Nothing
from proxy.http.route import route
from proxy.http.server import bounded_number, read_body
from proxy.records import ServedPolicy
from proxy.routing.policies import BASE
from proxy.store.protocol import Store

OWN = "own"
"""In a query, the publication for which another proxy asks: the answer is of own workers only."""
TYPES_S = 40.0
"""Seconds that an engine may take to report its types: its loader runs once, without contents. The
other proxies may take ANSWER_S more, and `ProxyClient` waits for 60 s."""
TYPES_BYTES = 16 * 2**20
"""Largest body of `POST /weights/types`: a tensor takes about 75 bytes, and a large mixture of
experts has 100,000."""
MAX_WAIT_S = 300.0
"""Longest wait of a request for workers to settle; the client asks again."""


class PublishedWeights:
    """Example: PublishedWeights(store, hub).restore(ServedPolicy("", 12, "run-a/v000012-…"))"""

    def __init__(self, store: Store, hub: RelayHub) -> None:
        self._store = store
        self._hub = hub

    @property
    def wanted(self) -> Weights | None:
        """The weights that the workers of this proxy are to serve."""
        return self._hub.weights

    def restore(self, served: ServedPolicy, before: Weights | None) -> None:
        """Makes the workers serve what another proxy, or this one before, has recorded. `before`
        is what was wanted when the record was read: newer weights stay. The patience of a request
        to another proxy is not recorded."""
        weights = Weights(served.adapter, served.version)
        if self._hub.weights == before != weights:
            self._hub.want(weights, PATIENCE_S)

    @route(
        "PUT",
        "/weights",
        name="publish_weights",
        summary="Makes every relay worker pull published weights; sampling continues meanwhile",
        answer=Nothing,
        takes=NewWeights,
        refusals=(400, 409),
    )
    async def publish(self, request: web.Request) -> web.Response:
        """Makes every worker pull and serve the weights.

        Raises:
            SessionError: 409, the weights belong to another run.
        """
        new = parsed(NewWeights, await read_body(request))
        hub = self._hub
        served = ServedPolicy(BASE.name, new.version, new.publication, new.run)
        if not await self._store.publish_policy(served):
            found = await self._store.get_policies()
            owner = next((each.run for each in found if each.name == BASE.name), "")
            raise SessionError(
                f"the engines' weights belong to the run {owner!r}; end or continue that run. If "
                f"it was killed and will not be continued: DELETE "
                f"/weights/runs/{quote(owner, safe='')}",
                status=409,
            )
        hub.want(Weights(new.publication, new.version), new.patience_s)
        return web.json_response({})

    @route(
        "DELETE",
        "/weights/runs/{run}",
        name="release_weights",
        summary="Lets other runs publish weights, if they belong to this run",
        answer=Nothing,
        refusals=(409,),
    )
    async def release(self, request: web.Request) -> web.Response:
        """Lets other runs publish weights, if these belong to this run."""
        await self._store.release_policy(BASE.name, request.match_info["run"])
        return web.json_response({})

    @route(
        "POST",
        "/weights/types",
        summary="In which types the engines of relay workers hold the weights of a trainer",
        answer=HeldTypes,
        takes=TensorsView,
        refusals=(400, 409),
    )
    async def held_types(self, request: web.Request) -> web.Response:
        """In which types the engines of workers hold weights, also those of other proxies on the
        store."""
        hub, body = self._hub, await read_body(request)
        asked = parsed(TensorsView, body, TYPES_BYTES).tensors
        tensors = tuple((name, dtype, tuple(shape)) for name, dtype, shape in asked)
        own = hub.held_dtypes(tensors, TYPES_S)
        if OWN in request.query:
            return web.json_response({"held_dtypes": list(await own)})
        held, others = await asyncio.gather(
            own, ask_others(self._store, request, {OWN: ""}, TYPES_S, body)
        )
        for other in others:
            held |= {each and tuple(each) for each in other["held_dtypes"]}
        return web.json_response({"held_dtypes": list(held)})

    @route(
        "GET",
        "/weights",
        name="show_weights",
        summary="Which weights each relay worker serves; with `wait_s`, once all have settled",
        answer=WeightsView,
        refusals=(400, 409),
        query={"wait_s": {"type": "number"}},
    )
    async def show(self, request: web.Request) -> web.Response:
        """What each worker serves, also those of other proxies on the store, once each has the
        weights or has failed, or after `wait_s`."""
        hub = self._hub
        wait_s = bounded_number(request.query.get("wait_s", "0"), "wait_s", 0, 1e9)
        until = asyncio.get_running_loop().time() + min(wait_s, MAX_WAIT_S)
        if OWN in request.query:
            await hub.until_settled(until, request.query[OWN])
            return web.json_response(_view(hub))
        views = await self._settled_views(request, until)
        if not any(view["workers"] for view in views):
            await hub.until_settled(until, needs_worker=True)
            views[0] = _view(hub)
        return web.json_response(_merged(views))

    async def _settled_views(self, request: web.Request, until: float) -> list[dict[str, Any]]:
        """The view of this proxy, and those of the others, once all have settled on what this one
        wants. It may hear meanwhile of newer weights, which the others have already and wait for
        no older ones: then they are asked again."""
        hub = self._hub
        while True:
            wanted = hub.weights
            settling = asyncio.create_task(self._others(request, wanted, until))
            replaced = asyncio.create_task(hub.until_replaced(wanted))
            try:
                await asyncio.wait([settling, replaced], return_when=asyncio.FIRST_COMPLETED)
                if settling.done():
                    return [_view(hub), *settling.result()]
            finally:
                settling.cancel()
                replaced.cancel()
                await asyncio.wait([settling, replaced])

    async def _others(
        self, request: web.Request, wanted: Weights | None, until: float
    ) -> list[dict[str, Any]]:
        """The views of the other proxies, once they and this one have settled, or at `until`."""
        left_s = max(0.0, until - asyncio.get_running_loop().time())
        asked = {"wait_s": f"{left_s:g}", OWN: wanted.publication if wanted else ""}
        others: list[dict[str, Any]]
        others, _ = await asyncio.gather(
            ask_others(self._store, request, asked, left_s), self._hub.until_settled(until)
        )
        return others


def _view(hub: RelayHub) -> dict[str, Any]:
    """The `WeightsView` of this proxy's own workers."""
    wanted = hub.weights
    return {
        "publication": wanted and wanted.publication,
        "version": wanted and wanted.version,
        "settled": hub.settled,
        "held_dtypes": list({e.serves.held for e in hub.engines if e.has_wanted}),
        "workers": [_worker(engine) for engine in hub.engines],
    }


def _merged(views: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The first view with the workers of all."""
    first, with_workers = views[0], [view for view in views if view["workers"]]
    wanted = first["publication"]
    held = {each and tuple(each) for view in with_workers for each in view["held_dtypes"]}
    return first | {
        "settled": bool(with_workers)
        and all(view["settled"] and view["publication"] == wanted for view in with_workers),
        "held_dtypes": list(held),
        "workers": [worker for view in with_workers for worker in view["workers"]],
    }


def _worker(engine: RelayEngine) -> dict[str, Any]:
    serves = engine.serves
    return {
        "name": engine.info.name,
        "connected": engine.connected,
        "serves_wanted": engine.has_wanted,
        "publication": serves.publication or None,
        "version": serves.version,
        "adapter": serves.adapter or None,
        "error": serves.error,
        "pulled_bytes": serves.pulled_bytes,
        "pull_s": serves.pull_s,
        "paused_s": serves.paused_s,
        "difference": serves.difference,
    }
