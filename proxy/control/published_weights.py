"""The control plane of published weights: which ones every relay worker is to serve.

Invariant: they are recorded in the store as the version of the policy without a name, so that a
proxy that is started again, or another one on the store, makes its workers serve them. A run's
weights are replaced by another run only after it has released them.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, unquote

from aiohttp import web

from proxy.control.schema import parsed
from proxy.control.weights_schema import NewWeights
from proxy.errors import RequestError, SessionError
from proxy.http_request import bounded_number, read_body
from proxy.policies import BASE
from proxy.records import ServedPolicy
from proxy.relay.engine import RelayEngine
from proxy.relay.hub import RelayHub
from proxy.relay.protocol import Weights
from proxy.store.protocol import Store

MAX_WAIT_S = 300.0
"""Longest wait of a request for workers to settle; the client asks again."""


class PublishedWeights:
    """Example: PublishedWeights(store, hub).restore(ServedPolicy("", 12, "run-a/v000012-…"))"""

    def __init__(self, store: Store, hub: RelayHub | None) -> None:
        """`hub` is None if the proxy has no relay."""
        self._store = store
        self._hub = hub

    def restore(self, served: ServedPolicy) -> None:
        """Makes the workers serve what another proxy, or this one before, has recorded."""
        weights = Weights(served.adapter, served.version)
        if self._hub is not None and self._hub.weights != weights:
            self._hub.want(weights, 0.0)

    async def publish(self, request: web.Request) -> web.Response:
        """Makes every worker pull and serve the weights.

        Raises:
            RequestError: 409, the proxy has no relay.
            SessionError: 409, the weights belong to another run.
        """
        new = parsed(NewWeights, await read_body(request))
        hub = self._relay()
        served = ServedPolicy(BASE.name, new.version, new.publication, new.run)
        if not await self._store.publish_policy(served):
            found = await self._store.get_policies()
            owner = next((each.run for each in found if each.name == BASE.name), "")
            raise SessionError(
                f"the engines' weights belong to the run {owner!r}; end or continue that run. If "
                f"it was killed and will not be continued: DELETE /weights/runs/{quote(owner)}",
                status=409,
            )
        hub.want(Weights(new.publication, new.version), new.patience_s)
        return web.json_response({})

    async def release(self, request: web.Request) -> web.Response:
        """Lets other runs publish weights, if these belong to this run."""
        await self._store.release_policy(BASE.name, unquote(request.match_info["run"]))
        return web.json_response({})

    async def show(self, request: web.Request) -> web.Response:
        """What each worker serves, once each has the weights or has failed, or after `wait_s`."""
        hub = self._relay()
        wait_s = bounded_number(request.query.get("wait_s", "0"), "wait_s", 0, 1e9)
        settled = await hub.until_settled(min(wait_s, MAX_WAIT_S))
        wanted = hub.weights
        view = {
            "publication": wanted and wanted.publication,
            "version": wanted and wanted.version,
            "settled": settled,
            "held_dtypes": list({e.serves.held for e in hub.engines if e.has_wanted}),
            "workers": [_worker(engine) for engine in hub.engines],
        }
        return web.json_response(view)

    def _relay(self) -> RelayHub:
        if self._hub is None:
            raise RequestError(
                "this proxy has no relay; set relay.token, with which workers connect to it",
                status=409,
            )
        return self._hub


def _worker(engine: RelayEngine) -> dict[str, Any]:
    serves = engine.serves
    return {
        "name": engine.info.name,
        "connected": engine.connected,
        "serves_wanted": engine.has_wanted,
        "publication": serves.publication or None,
        "version": serves.version,
        "error": serves.error,
        "pulled_bytes": serves.pulled_bytes,
        "pull_s": serves.pull_s,
        "paused_s": serves.paused_s,
        "difference": serves.difference,
    }
