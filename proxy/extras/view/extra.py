"""The extra `page`: the page that people open in the browser, on the record of this proxy."""

from __future__ import annotations

from typing import Any, cast

from aiohttp import web

from proxy.admin_key import AdminKeys, key_file
from proxy.config import ProxyConfig
from proxy.extra import Core, Extra, Invitation
from proxy.extras.view.access import LINK_SUFFIX, Access, new_link, said_link
from proxy.extras.view.answers import RecordState
from proxy.extras.view.api import ROUTES, ViewApi
from proxy.extras.view.curation_requests import CurationRequests
from proxy.extras.view.runs import RecordedRuns
from proxy.http.openapi import DocumentPart
from proxy.http.route import Route
from proxy.person_keys import PersonKeys
from proxy.rendering.tokenizer import Tokenizer
from proxy.store.protocol import Store


class Page(Extra):
    """Answers the requests of the page, which has keys of its own."""

    routes = ROUTES
    documented = DocumentPart(
        "page",
        "view_key",
        "a key of `agentic-proxy view-key create`, or the admin key; browsers have a cookie",
        ROUTES,
    )

    async def open(self, core: Core) -> None:
        self.core, config, store = core, core.config, core.store
        access = Access(
            lambda: store.browser,
            AdminKeys(config),
            PersonKeys(config.people),
            secure=(config.public_url or "").startswith("https:"),
        )
        runs = RecordedRuns([] if config.run is None else [config.run], config.published_runs)

        def tokenizer() -> Tokenizer | None:
            return core.rendering.tokenizer

        self._api = ViewApi(
            lambda: store.browser,
            access,
            self._state,
            tokenizer,
            runs,
            curation=CurationRequests(lambda: store, core.sessions.delete, tokenizer),
            rules=config.rules or [],
        )
        words = "1: how a training run is doing"
        core.metrics.gauges("run_verdict", words, ("run", "verdict"), runs.verdicts, shared=True)
        words = "The last value of a metric of a training run (docs/metrics.md)"
        core.metrics.gauges("run_metric", words, ("run", "metric"), runs.last, shared=True)

    async def serve(self, route: Route, request: web.Request) -> web.StreamResponse:
        return await self._api.serve(route, request)

    async def invitation(self, config: ProxyConfig, store: Store) -> Invitation:
        key = key_file(config)
        file = key.with_name(key.name + LINK_SUFFIX)
        secret = await new_link(store.browser)

        def invitation(url: str) -> str:
            try:
                said = said_link(url, secret, file)
            except OSError:  # in a container, the key's folder is read-only
                said = f"{url} (log in with the admin key of {key})"
            return f"see everything, live: {said}"

        return invitation

    async def stop(self) -> None:
        self._api.close()

    def _state(self) -> RecordState:
        router = self.core.router
        state: dict[str, Any] = {
            "engines": router.infos,
            "policies": [
                {"name": each.name, "version": each.version} for each in router.policies.published
            ],
            "paused": router.paused,
            "waiting": router.waiting,
            "rule_faults": [],
            "learners": [],
        }
        for extra in self.core.extras:
            state |= extra.state()
        return cast(RecordState, state)
