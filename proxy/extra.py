"""The protocol of an extra: a part of the proxy that a mission can do without.

`open_extras` makes those that the configuration names: by their sections (`proxy.extra_registry`),
or in `extras`, where each is named by a class of your own, an `ExtraConfig`. The application
asks each for its `routes`, opens it with the `Core`, hands it every recorded turn (`on_turn`) and
every ended session (`on_end`), and closes it. An extra that counts something makes its own metrics
in `core.metrics` when it opens.

Invariant: the core knows of an extra only what is here, and extras do not import each other. The
order of a life is: `of` → `open` → hooks → `stop` (the calls in flight have ended) → `close` (all
connections have ended; the store is still open).

Example:
    class Applause(Extra):
        routes = routes_of(…)

        async def open(self, core: Core) -> None:
            self._turns = core.metrics.counter("applause", "Turns that were applauded")

        def on_turn(self, session_id: str, turn: Turn, model: str) -> None:
            self._turns.inc()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from aiohttp import web

from proxy.config import ProxyConfig
from proxy.control.door import ControlDoor
from proxy.control.policies import PublishedPolicies
from proxy.extra_registry import EXTRAS, named_extras
from proxy.http.openapi import DocumentPart
from proxy.http.route import Route
from proxy.metrics import Metrics
from proxy.records import Turn
from proxy.rendering.rendering import Rendering
from proxy.routing.router import Router
from proxy.serving.sessions import Sessions
from proxy.settings.plugins import load_plugin
from proxy.settings.section import Section
from proxy.store.protocol import Store

Invitation = Callable[[str], str]
"""What `agentic-proxy serve` prints about an extra, of the proxy's URL, which is known when it
listens."""


@dataclass(frozen=True, slots=True)
class Core:
    """What an extra may use of the proxy."""

    config: ProxyConfig
    store: Store
    router: Router
    rendering: Rendering
    sessions: Sessions
    metrics: Metrics
    policies: PublishedPolicies
    door: ControlDoor
    extras: Sequence[Extra]
    """All that are on, in the order of the registry."""


class Extra:
    """The base class of extras; every method does nothing by default."""

    routes: Sequence[Route] = ()
    """The requests that it answers."""
    documented: DocumentPart | None = None
    """The part of the OpenAPI document that has its routes; None: the control plane's."""
    brings_engines: bool = False
    """Whether engines join by it, so that the proxy needs none of its own."""
    core: Core

    @classmethod
    def of(cls, config: ProxyConfig) -> Self | None:
        """The extra with its section of the configuration; None if the section switches it off.

        Raises ConfigurationError.
        """
        return cls()

    async def open(self, core: Core) -> None:
        """Begins its work. Engines are not yet asked for anything, and no request is answered.

        Raises ConfigurationError.
        """

    async def serve(self, route: Route, request: web.Request) -> web.StreamResponse:
        """Answers a request to one of `routes`: by default, through the control plane's door."""
        return await self.core.door.serve(route, partial(route.handler, self), request)

    async def on_create(self, limits: Mapping[str, Any]) -> None:
        """A session is about to be created with these limits. Raises RequestError to refuse it."""

    async def policies_of(self, metadata: Mapping[str, Any]) -> Mapping[str, str]:
        """The policies of a new session of kind `train` that names none; empty: it has no say."""
        return {}

    def on_turn(self, session_id: str, turn: Turn, model: str) -> None:
        """A turn is recorded, for the session that made the call, whose agent requested this model
        name. Must return at once."""

    async def on_end(self, session_id: str) -> None:
        """A session was completed; `complete` answers when this returns.

        Raises StoreError.
        """

    async def invitation(self, config: ProxyConfig, store: Store) -> Invitation | None:
        """What `agentic-proxy serve` prints about it when the proxy listens.
        Called before `open`, or without it."""
        return None

    def state(self) -> Mapping[str, Any]:
        """What the page shows of it, by names of `proxy.extras.view.answers.RecordState`."""
        return {}

    async def stop(self) -> None:
        """Ends its connections and streams, so that the server can end."""

    async def close(self) -> None:
        """Ends the rest of its work."""


class ExtraConfig(Section):
    """The section of an extra of your own.

    Example:
        class ApplauseConfig(ExtraConfig):
            least_tokens: int = 0

            def build(self) -> Applause:
                return Applause(self)
    """

    def build(self) -> Extra:
        """Raises ConfigurationError: these settings cannot work here."""
        raise NotImplementedError


def open_extras(config: ProxyConfig) -> list[Extra]:
    """The extras that the configuration names and does not switch off.

    Raises:
        ConfigurationError: one cannot be imported, or refuses its section.
    """
    made = (extra_class(name).of(config) for name in named_extras(config))
    outside = [each.section(ExtraConfig).build() for each in config.extras]
    return [*(extra for extra in made if extra is not None), *outside]


def extra_class(name: str) -> type[Extra]:
    """The class of a registered extra. Raises ConfigurationError if it cannot be imported."""
    found: type[Extra] = load_plugin(name, EXTRAS[name].extra, {})
    return found
