"""The extra `relay`: engines behind a firewall connect to the proxy and pull published weights."""

from __future__ import annotations

from functools import partial
from typing import Self

from aiohttp import web

from proxy.config import ProxyConfig
from proxy.extra import Core, Extra
from proxy.extras.relay.fingerprint import fingerprint
from proxy.extras.relay.hub import RelayHub
from proxy.extras.relay.protocol import PATH
from proxy.extras.relay.published_weights import PublishedWeights
from proxy.extras.relay.section import RelayConfig
from proxy.http.route import Route, Who, route, routes_of


class Relay(Extra):
    """Answers workers at `PATH`, and the control plane's requests for published weights."""

    brings_engines = True

    @classmethod
    def of(cls, config: ProxyConfig) -> Self | None:
        section: RelayConfig = config.relay
        return None if section.token is None else cls()

    async def open(self, core: Core) -> None:
        self.core = core
        assert core.config.model is not None
        model, router = fingerprint(core.config.model), core.router
        self._hub = RelayHub(core.config.relay, model, joined=router.add, left=router.remove)
        self._weights = PublishedWeights(core.store, self._hub)
        core.policies.follow_base(self._weights)

    async def serve(self, route: Route, request: web.Request) -> web.StreamResponse:
        if route.owner is Relay:
            return await self._hub.connect(request)
        return await self.core.door.serve(route, partial(route.handler, self._weights), request)

    @route("GET", PATH, summary="A worker's WebSocket", who=Who.WORKER, documented=False)
    async def _connect(self, request: web.Request) -> web.StreamResponse:
        return await self._hub.connect(request)

    async def stop(self) -> None:
        await self._hub.close()


Relay.routes = routes_of(Relay, PublishedWeights)
