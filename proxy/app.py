"""The proxy as one aiohttp application: data plane, control plane, and what they share.

`build_app` takes engines and store as given (tests, embedding), or makes them from the
configuration. Invariant: what it opens it closes, in reverse order, when the application ends.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial

from aiohttp import web

from proxy.calls import Calls
from proxy.config import EngineConfig, ProxyConfig
from proxy.control.plane import ROUTES, ControlPlane
from proxy.data_plane import DataPlane
from proxy.engines.completions import CompletionsEngine
from proxy.engines.protocol import Engine
from proxy.engines.sglang import SglangEngine
from proxy.engines.text import TextEngine
from proxy.engines.vllm import VllmEngine
from proxy.errors import ConfigurationError
from proxy.metrics import Metrics
from proxy.processes.siblings import Siblings
from proxy.profiles import Profiles
from proxy.relay.fingerprint import fingerprint
from proxy.relay.hub import RelayHub
from proxy.relay.protocol import PATH as RELAY_PATH
from proxy.rendering.rendering import Rendering
from proxy.rendering.tokenizer import Tokenizer, load_tokenizer
from proxy.routing import Router
from proxy.sessions import Sessions
from proxy.store import open_store
from proxy.store.protocol import Store
from proxy.wire.chat import ChatDialect
from proxy.wire.completions import CompletionsDialect
from proxy.wire.dialect import Dialect
from proxy.wire.messages import MessagesDialect
from proxy.wire.responses import ResponsesDialect

DATA_PLANE = web.AppKey("data_plane", DataPlane)
CONTROL_PLANE = web.AppKey("control_plane", ControlPlane)
CALLS = web.AppKey("calls", Calls)
RELAY = web.AppKey("relay", RelayHub)
STORE: web.AppKey[Store] = web.AppKey("store")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def build_app(
    config: ProxyConfig,
    *,
    engines: Sequence[Engine] | None = None,
    store: Store | None = None,
    siblings: Siblings | None = None,
) -> web.Application:
    """Raises ConfigurationError when the model's folder cannot be used."""
    if config.model is None:
        raise ConfigurationError("model: give the folder of the checkpoint that the engines serve")
    rendering = Rendering(load_tokenizer(config.model), config.rendering)
    app = web.Application(client_max_size=config.limits.body_bytes)
    for method, path, name in ROUTES:
        app.router.add_route(method, path, _control(name))
    dialects = _dialects()
    for route in dialects:
        app.router.add_post(f"/v1/{route}", _data)
    if config.relay.token is not None:
        app.router.add_get(RELAY_PATH, _relay)
    app.router.add_route("*", r"/{path:[\s\S]+}", _data)
    app.cleanup_ctx.append(
        _parts(config, rendering, dialects, engines, store, siblings or Siblings())
    )
    app.on_shutdown.append(_end_calls(config.limits.shutdown_s))
    return app


def make_engine(config: EngineConfig, tokenizer: Tokenizer) -> Engine:
    """A client of the replica; nothing is connected yet."""
    kinds: dict[str, Callable[..., Engine]] = {
        "vllm": VllmEngine,
        "completions": CompletionsEngine,
        "sglang": SglangEngine,
        "text": partial(TextEngine, tokenizer=tokenizer),
    }
    key = config.api_key.get_secret_value() if config.api_key else None
    return kinds[config.kind](config.url, name=config.name, api_key=key, model=config.model)


def _parts(
    config: ProxyConfig,
    rendering: Rendering,
    dialects: dict[str, Dialect],
    engines: Sequence[Engine] | None,
    given_store: Store | None,
    siblings: Siblings,
) -> Callable[[web.Application], AsyncGenerator[None, None]]:
    async def run(app: web.Application) -> AsyncGenerator[None, None]:
        store = given_store or await open_store(config.store, durability=config.durability)
        app[STORE] = store
        make = partial(make_engine, tokenizer=rendering.tokenizer)
        replicas = [make(e) for e in config.engines] if engines is None else list(engines)
        router = Router(replicas, version=config.policy_version)
        await router.start()
        sessions, metrics = Sessions(store, config.sessions, Profiles(config.profiles)), Metrics()
        app[CALLS] = calls = Calls(
            sessions,
            rendering,
            router,
            store,
            metrics,
            context_tokens=config.max_context_tokens or rendering.tokenizer.max_context_tokens,
            call_timeout_s=config.limits.call_timeout_s,
        )
        if config.relay.token is not None:
            app[RELAY] = _open_relay(config, router)
        app[DATA_PLANE] = DataPlane(config, sessions, calls, rendering, dialects, metrics)
        app[CONTROL_PLANE] = ControlPlane(config, sessions, store, router, metrics, make, siblings)
        yield
        await router.close()
        if given_store is None:
            await store.close()

    return run


def _open_relay(config: ProxyConfig, router: Router) -> RelayHub:
    assert config.model is not None
    model = fingerprint(config.model)
    return RelayHub(config.relay, model, joined=router.add, left=router.remove)


def _end_calls(shutdown_s: float) -> Callable[[web.Application], Awaitable[None]]:
    """Nothing new is taken any more; what runs may end, and then the workers are let go."""

    async def end(app: web.Application) -> None:
        await app[CALLS].close(shutdown_s)
        if RELAY in app:
            await app[RELAY].close()

    return end


def _dialects() -> dict[str, Dialect]:
    """By the route behind `/v1/`."""
    return {
        "chat/completions": ChatDialect(),
        "completions": CompletionsDialect(),
        "responses": ResponsesDialect(),
        "messages": MessagesDialect(),
    }


def _control(name: str) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        return await request.app[CONTROL_PLANE].handle(name, request)

    return handle


async def _relay(request: web.Request) -> web.StreamResponse:
    return await request.app[RELAY].connect(request)


async def _data(request: web.Request) -> web.StreamResponse:
    return await request.app[DATA_PLANE].handle(request)
