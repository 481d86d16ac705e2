"""The proxy as one aiohttp application: data plane, control plane, and the extras that are on.

`build_app` uses the given engines and store (tests, embedding), or creates them from the
configuration. Invariant: it closes what it opened, in reverse order, when the application ends. It
knows of an extra only the protocol (`proxy.extra`).
"""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache, partial
from typing import Any

from aiohttp import web

from proxy.config import ListenConfig, ProxyConfig, RetentionConfig
from proxy.control.door import ControlDoor
from proxy.control.plane import ControlPlane
from proxy.control.policies import PublishedPolicies
from proxy.control.siblings import NoSiblings, Siblings
from proxy.engines.protocol import Engine
from proxy.engines.registry import make_engine
from proxy.errors import ConfigurationError
from proxy.extra import Core, Extra, extra_class, open_extras
from proxy.extra_registry import EXTRAS
from proxy.http.openapi import DocumentPart, document
from proxy.http.route import Route, add_routes, routes_of
from proxy.http.server import answer_expect
from proxy.http.web_guard import Hosts, host_of, web_guard
from proxy.machine.memory import Trimmer
from proxy.metrics import Metrics
from proxy.records import Turn
from proxy.rendering.rendering import Rendering
from proxy.rendering.tokenizer import load_tokenizer
from proxy.routing.router import Router
from proxy.serving.backend import Backend
from proxy.serving.endpoints import AgentEndpoints
from proxy.serving.forwarding import CONFIRMED_PATH
from proxy.serving.images import Images
from proxy.serving.incoming import IncomingCalls
from proxy.serving.ownership import Deliveries, Ownership
from proxy.serving.provider_tools import ProviderTools
from proxy.serving.sessions import Sessions
from proxy.settings.profiles import Profiles
from proxy.store import open_store
from proxy.store.protocol import Store
from proxy.store.retention import keep_removing
from proxy.wire.dialect import Dialect
from proxy.wire.registry import open_dialects

ENDPOINTS = web.AppKey("endpoints", AgentEndpoints)
CONTROL_PLANE = web.AppKey("control_plane", ControlPlane)
CALLS = web.AppKey("calls", IncomingCalls)
STORE: web.AppKey[Store] = web.AppKey("store")

CONTROL_ROUTES = routes_of(ControlPlane)


def document_parts(extras: Iterable[Extra | type[Extra]] | None = None) -> list[DocumentPart]:
    """What `/openapi.json` describes: the control plane, and the parts of its own that an extra
    has. `extras`: those that are on; None: all that are registered."""
    shown = list(map(extra_class, EXTRAS)) if extras is None else list(extras)
    routes = [*CONTROL_ROUTES]
    for extra in shown:
        if extra.documented is None:
            routes += extra.routes
    control = DocumentPart("control plane", "admin_key", "the admin key", routes)
    return [control, *(extra.documented for extra in shown if extra.documented is not None)]


def build_app(
    config: ProxyConfig,
    *,
    engines: Sequence[Engine] | None = None,
    store: Store | None = None,
    siblings: Siblings | None = None,
) -> web.Application:
    """Raises ConfigurationError when the model's folder cannot be used, an admin key is missing, or
    an extra refuses its section."""
    if config.admin_key is None:
        raise ConfigurationError(
            "admin_key is not set; set it, or use `proxy.admin_key.with_admin_key(config)`"
        )
    if config.model is None:
        raise ConfigurationError("model: give the folder of the checkpoint that the engines serve")
    rendering = Rendering(load_tokenizer(config.model), config.rendering)
    extras, siblings = open_extras(config), siblings or NoSiblings()

    async def call(request: web.Request) -> web.StreamResponse:
        return await app[ENDPOINTS].handle(request)

    async def control(route: Route, request: web.Request) -> web.StreamResponse:
        return await door.serve(route, partial(route.handler, app[CONTROL_PLANE]), request)

    def needs_json(request: web.Request) -> bool:
        """Not for the data plane, where agents send various content types."""
        return request.match_info.handler is not call

    # Other sites may link to what a browser shows.
    pages = [r.path for extra in extras for r in extra.routes if "text/html" in r.other_types]
    guard = web_guard(hosts(config), needs_json=needs_json, pages=pages)
    app = web.Application(client_max_size=config.limits.body_bytes, middlewares=[guard])
    door = ControlDoor(config, siblings)
    add_routes(app, [*CONTROL_ROUTES, *_missing(extras)], control)
    for extra in extras:
        add_routes(app, extra.routes, extra.serve)
    dialects = open_dialects(config.dialects)
    for route in dialects:
        app.router.add_post(f"/v1/{route}", call, expect_handler=answer_expect)
    app.router.add_post(CONFIRMED_PATH, _confirmed, expect_handler=answer_expect)
    app.router.add_route("*", r"/{path:[\s\S]*}", call, expect_handler=answer_expect)
    app.cleanup_ctx.append(
        _parts(config, rendering, dialects, engines, store, siblings, extras, door)
    )
    app.on_shutdown.append(_end_calls(config.limits.shutdown_s, extras))
    return app


def hosts(config: ListenConfig) -> Hosts:
    """The names by which the proxy may be called."""
    urls = [url for url in (config.public_url, config.peer_url) if url is not None]
    return Hosts(config.host, [*config.allowed_hosts, *(host_of(url) for url in urls)])


def _parts(
    config: ProxyConfig,
    rendering: Rendering,
    dialects: dict[str, Dialect],
    engines: Sequence[Engine] | None,
    given_store: Store | None,
    siblings: Siblings,
    extras: Sequence[Extra],
    door: ControlDoor,
) -> Callable[[web.Application], AsyncGenerator[None, None]]:
    async def run(app: web.Application) -> AsyncGenerator[None, None]:
        store = given_store or await open_store(config.store_url, durability=config.durability)
        app[STORE] = store
        make = partial(make_engine, rendering=rendering)
        replicas = [make(e) for e in config.engines] if engines is None else list(engines)
        profiles, metrics = Profiles(config.profiles), Metrics()
        router = _make_router(config, rendering, replicas, metrics)
        sessions = Sessions(store, config.sessions, profiles, on_end=router.forget)
        policies = PublishedPolicies(store, router)
        core = Core(
            *(config, store, router, rendering, sessions, metrics, policies, door), extras=extras
        )
        for extra in extras:
            await extra.open(core)
        await router.start()
        hooks = _Hooks(extras)
        ownership, deliveries = Ownership(store), Deliveries(store)
        backend = Backend(
            store,
            router,
            rendering,
            metrics,
            ownership,
            deliveries,
            ProviderTools(config.tools, store),
            Images(store, router, rendering, config.rendering.image_urls),
            context_tokens=config.max_context_tokens or rendering.tokenizer.max_context_tokens,
            call_timeout_s=config.limits.call_timeout_s,
            on_turn=hooks.on_turn,
        )
        app[CALLS] = calls = IncomingCalls(backend, config.sessions)
        trimmer = Trimmer()
        app[ENDPOINTS] = AgentEndpoints(
            *(sessions, calls, dialects, metrics, config.limits),
            model_name=config.model_name,
            refuse_unknown=config.unknown_fields == "refuse",
            on_release=trimmer.after,
        )
        app[CONTROL_PLANE] = ControlPlane(
            *(config, config.limits, sessions, store, router, metrics, make, siblings, deliveries),
            policies=policies,
            on_create=hooks.on_create,
            policies_of=hooks.policies_of,
            on_end=hooks.on_end,
            document=cache(partial(document, document_parts(extras))),
        )
        async with policies.followed(), _removing(store, config.retention):
            yield
        trimmer.stop()
        for extra in reversed(extras):
            await extra.close()
        await deliveries.close()
        await ownership.stop()
        await router.close()
        if given_store is None:
            await store.close()

    return run


class _Hooks:
    """Passes what happens to every extra that overrides the hook."""

    def __init__(self, extras: Sequence[Extra]) -> None:
        self._extras = extras
        self._on_turn = [e.on_turn for e in extras if type(e).on_turn is not Extra.on_turn]

    async def on_create(self, limits: Mapping[str, Any]) -> None:
        for extra in self._extras:
            await extra.on_create(limits)

    async def policies_of(self, metadata: Mapping[str, Any]) -> Mapping[str, str]:
        for extra in self._extras:
            if policies := await extra.policies_of(metadata):
                return policies
        return {}

    def on_turn(self, session_id: str, turn: Turn, model: str) -> None:
        for hook in self._on_turn:
            hook(session_id, turn, model)

    async def on_end(self, session_id: str) -> None:
        for extra in self._extras:
            await extra.on_end(session_id)


def _make_router(
    config: ProxyConfig, rendering: Rendering, replicas: Sequence[Engine], metrics: Metrics
) -> Router:
    return Router(
        replicas,
        vocab_size=rendering.tokenizer.vocab_size,
        patience_s=config.limits.engine_patience_s,
        on_failure=metrics.engine_failed,
        shared=config.workers > 1 or not config.store.startswith("sqlite"),
    )


@asynccontextmanager
async def _removing(store: Store, retention: RetentionConfig) -> AsyncIterator[None]:
    """Removes old sessions in the background, if the configuration asks for it."""
    async with AsyncExitStack() as stack:
        if retention.max_bytes is not None and await store.used_bytes() is None:
            raise ConfigurationError(
                f"retention.max_bytes={retention.max_bytes}: the size of this store is not known; "
                "use a SQLite store, or retention.completed_s alone"
            )
        if retention.completed_s is not None or retention.max_bytes is not None:
            task = asyncio.create_task(keep_removing(store, retention))
            stack.push_async_callback(asyncio.wait, [task])
            stack.callback(task.cancel)
        yield


def _missing(extras: Sequence[Extra]) -> Iterator[Route]:
    """Routes that answer requests for an extra that is off with how to switch it on."""
    served = {route.path.split("/")[1] for extra in extras for route in extra.routes}
    for registered in EXTRAS.values():
        for path in registered.paths:
            if path.strip("/") not in served:
                for each in (path, path + "/{more:.*}"):
                    yield Route.missing(each, registered.missing)


def _end_calls(
    shutdown_s: float, extras: Sequence[Extra]
) -> Callable[[web.Application], Awaitable[None]]:
    """Refuses new calls, lets those in flight end, and then ends the connections of extras."""

    async def end(app: web.Application) -> None:
        await app[CALLS].close(shutdown_s)
        for extra in reversed(extras):
            await extra.stop()

    return end


async def _confirmed(request: web.Request) -> web.StreamResponse:
    return request.app[ENDPOINTS].confirm(request.match_info["number"])
