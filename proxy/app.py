"""The proxy as one aiohttp application: data plane, control plane, and what they share.

`build_app` uses the given engines and store (tests, embedding), or creates them from the
configuration. Invariant: it closes what it opened, in reverse order, when the application ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial

from aiohttp import web

from proxy.config import ListenConfig, ProxyConfig, RetentionConfig
from proxy.control.operations import OPERATIONS
from proxy.control.plane import ROUTES, ControlPlane
from proxy.engines.protocol import Engine
from proxy.engines.registry import make_engine
from proxy.errors import ConfigurationError, SessionError
from proxy.extras.relay.fingerprint import fingerprint
from proxy.extras.relay.hub import RelayHub
from proxy.extras.relay.protocol import PATH as RELAY_PATH
from proxy.extras.rules.watch import RuleWatch
from proxy.extras.schedule.admission import CacheAdmission
from proxy.extras.several_processes.siblings import Siblings
from proxy.extras.telemetry import ObservedMetrics, Telemetry
from proxy.extras.view.access import Access
from proxy.extras.view.api import PAGE, ViewApi, add_routes
from proxy.extras.view.api import ROUTES as PAGE_ROUTES
from proxy.extras.view.operations import OPERATIONS as PAGE_OPERATIONS
from proxy.extras.view.runs import RecordedRuns
from proxy.http.openapi import DocumentPart, document
from proxy.http.server import answer_expect, forget_body
from proxy.http.web_guard import Hosts, host_of, web_guard
from proxy.keys import AdminKeys
from proxy.machine.memory import Trimmer
from proxy.metrics import Metrics
from proxy.records import Mark
from proxy.rendering.rendering import Rendering
from proxy.rendering.tokenizer import load_tokenizer
from proxy.routing.router import Router
from proxy.serving.backend import Backend
from proxy.serving.endpoints import AgentEndpoints
from proxy.serving.forwarding import CONFIRMED_PATH
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
RELAY = web.AppKey("relay", RelayHub)
STORE: web.AppKey[Store] = web.AppKey("store")
VIEW = web.AppKey("view", ViewApi)

DOCUMENTED = (
    DocumentPart("control plane", "admin_key", "the admin key", ROUTES, OPERATIONS),
    DocumentPart(
        "page",
        "view_key",
        "a key of `agentic-proxy view-key create`, or the admin key; browsers have a cookie",
        PAGE_ROUTES,
        PAGE_OPERATIONS,
    ),
)
"""What `/openapi.json` describes."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def build_app(
    config: ProxyConfig,
    *,
    engines: Sequence[Engine] | None = None,
    store: Store | None = None,
    siblings: Siblings | None = None,
) -> web.Application:
    """Raises ConfigurationError when the model's folder cannot be used, or an admin key is
    missing."""
    if config.admin_key is None:
        raise ConfigurationError(
            "admin_key is not set; set it, or use `proxy.keys.with_admin_key(config)`"
        )
    if config.model is None:
        raise ConfigurationError("model: give the folder of the checkpoint that the engines serve")
    rendering = Rendering(load_tokenizer(config.model), config.rendering)

    async def call(request: web.Request) -> web.StreamResponse:
        return await app[ENDPOINTS].handle(request)

    def needs_json(request: web.Request) -> bool:
        """Not for the data plane, where agents send various content types."""
        return request.match_info.handler is not call

    guard = web_guard(hosts(config), needs_json=needs_json, pages=(PAGE,))
    app = web.Application(client_max_size=config.limits.body_bytes, middlewares=[guard])
    for method, path, name in ROUTES:
        app.router.add_route(method, path, _control(name), expect_handler=answer_expect)
    add_routes(app, lambda: app[VIEW])
    dialects = open_dialects(config.dialects)
    for route in dialects:
        app.router.add_post(f"/v1/{route}", call, expect_handler=answer_expect)
    if config.relay.token is not None:
        app.router.add_get(RELAY_PATH, _relay, expect_handler=answer_expect)
    app.router.add_post(CONFIRMED_PATH, _confirmed, expect_handler=answer_expect)
    app.router.add_route("*", r"/{path:[\s\S]*}", call, expect_handler=answer_expect)
    app.cleanup_ctx.append(
        _parts(config, rendering, dialects, engines, store, siblings or Siblings())
    )
    app.on_shutdown.append(_end_calls(config.limits.shutdown_s))
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
) -> Callable[[web.Application], AsyncGenerator[None, None]]:
    async def run(app: web.Application) -> AsyncGenerator[None, None]:
        store = given_store or await open_store(config.store_url, durability=config.durability)
        app[STORE] = store
        make = partial(make_engine, rendering=rendering)
        replicas = [make(e) for e in config.engines] if engines is None else list(engines)
        profiles, metrics = Profiles(config.profiles), _metrics(config, replicas)
        router = _make_router(config, rendering, replicas, metrics)
        await router.start()
        sessions = Sessions(store, config.sessions, profiles, on_end=router.forget)
        watch = _open_watch(config, store, metrics, sessions)
        ownership, deliveries = Ownership(store), Deliveries(store)
        backend = Backend(
            store,
            router,
            rendering,
            metrics,
            ownership,
            deliveries,
            ProviderTools(config.tools, store),
            context_tokens=config.max_context_tokens or rendering.tokenizer.max_context_tokens,
            call_timeout_s=config.limits.call_timeout_s,
            on_recorded=watch.recorded,
        )
        app[CALLS] = calls = IncomingCalls(backend, config.sessions)
        if config.relay.token is not None:
            app[RELAY] = _open_relay(config, router)
        trimmer = Trimmer()
        app[ENDPOINTS] = AgentEndpoints(
            *(sessions, calls, dialects, metrics, config.limits),
            model_name=_model_name(config),
            refuse_unknown=config.unknown_fields == "refuse",
            on_release=trimmer.after,
        )
        app[CONTROL_PLANE] = ControlPlane(
            *(config, config.limits, sessions, store, router, metrics, make, siblings, deliveries),
            relay=app.get(RELAY),
            marked=watch.settled,
            document=document(DOCUMENTED),
        )
        app[VIEW] = _open_view(config, store, router, rendering, watch)
        async with app[CONTROL_PLANE].policies.followed(), _removing(store, config.retention):
            yield
        trimmer.stop()
        await watch.close()
        await deliveries.close()
        await ownership.stop()
        await router.close()
        if given_store is None:
            await store.close()
        if isinstance(metrics, ObservedMetrics):
            await asyncio.to_thread(metrics.close)

    return run


def _model_name(config: ProxyConfig) -> str:
    return config.served_model_name or (config.model.name if config.model else "model")


def _metrics(config: ProxyConfig, replicas: Sequence[Engine]) -> Metrics:
    """Raises ConfigurationError if OpenTelemetry is configured and not installed."""
    if config.telemetry.endpoint is None:
        return Metrics()
    telemetry = Telemetry(config.telemetry.endpoint, "agentic-proxy", {})
    model = _model_name(config)
    names = [replica.info.name for replica in replicas]
    providers = dict(zip(names, (engine.kind for engine in config.engines), strict=False))
    return ObservedMetrics(telemetry, model, providers, in_trial=config.run is not None)


def _make_router(
    config: ProxyConfig, rendering: Rendering, replicas: Sequence[Engine], metrics: Metrics
) -> Router:
    admission = CacheAdmission(
        config.scheduling, share=1 / config.workers, on_admitted=metrics.admitted
    )
    metrics.watch(admission.schedule)
    return Router(
        replicas,
        vocab_size=rendering.tokenizer.vocab_size,
        version=config.policy_version,
        patience_s=config.limits.engine_patience_s,
        on_failure=metrics.engine_failed,
        admission=admission,
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


def _open_relay(config: ProxyConfig, router: Router) -> RelayHub:
    assert config.model is not None
    model = fingerprint(config.model)
    return RelayHub(config.relay, model, joined=router.add, left=router.remove)


def _open_watch(
    config: ProxyConfig, store: Store, metrics: Metrics, sessions: Sessions
) -> RuleWatch:
    async def act(session_id: str, mark: Mark) -> None:
        with suppress(SessionError):  # the session was deleted meanwhile
            await sessions.end_by(mark, session_id)

    watch = RuleWatch(store, config.rules, metrics, act)
    watch.start()
    return watch


def _open_view(
    config: ProxyConfig, store: Store, router: Router, rendering: Rendering, watch: RuleWatch
) -> ViewApi:
    access = Access(
        lambda: store.browser,
        AdminKeys(config),
        secure=(config.public_url or "").startswith("https:"),
    )
    return ViewApi(
        lambda: store.browser,
        access,
        lambda: {
            "engines": router.infos,
            "policies": [
                {"name": each.name, "version": each.version} for each in router.policies.published
            ],
            "paused": router.paused,
            "waiting": router.waiting,
            "rule_faults": watch.faults,
        },
        lambda: rendering.tokenizer,
        RecordedRuns([] if config.run is None else [config.run], config.published_runs),
        rules=config.rules,
    )


def _end_calls(shutdown_s: float) -> Callable[[web.Application], Awaitable[None]]:
    """Refuses new calls, lets those in flight end, and then disconnects the relay's workers."""

    async def end(app: web.Application) -> None:
        app[VIEW].close()
        await app[CALLS].close(shutdown_s)
        if RELAY in app:
            await app[RELAY].close()

    return end


def _control(name: str) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            return await request.app[CONTROL_PLANE].handle(name, request)
        finally:
            forget_body(request)

    return handle


async def _relay(request: web.Request) -> web.StreamResponse:
    return await request.app[RELAY].connect(request)


async def _confirmed(request: web.Request) -> web.StreamResponse:
    return request.app[ENDPOINTS].confirm(request.match_info["number"])
