"""The control plane: sessions, their records and rewards, events, engines, versions.

Invariant: every request needs the admin key, except for health and readiness; for metrics, a key
of `metrics_key_file` is enough. An API key appears only in the answer that creates it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

import orjson
from aiohttp import web

from proxy.config import EngineConfig, LimitsConfig, ListenConfig
from proxy.control import audit
from proxy.control.branch_request import with_origin
from proxy.control.event_stream import EventStream, ends_within
from proxy.control.operations import OPERATIONS
from proxy.control.policies import PublishedPolicies
from proxy.control.quotas import SharedQuotas
from proxy.control.record_view import session_view, trajectories_view, turn_view
from proxy.control.schema import (
    NewEngine,
    NewReward,
    NewSession,
    Version,
    parsed,
)
from proxy.engines.protocol import Engine
from proxy.errors import ConfigurationError, EngineError, ProxyError, RequestError, SessionError
from proxy.extras.relay.hub import RelayHub
from proxy.extras.relay.published_weights import PublishedWeights
from proxy.extras.rewind.replay_view import replay_view
from proxy.extras.several_processes.siblings import Siblings, is_from_sibling
from proxy.http.server import api_key, bounded_number, read_body
from proxy.keys import AdminKeys, KeyFile
from proxy.metrics import Metrics
from proxy.records import Reward, Session, SessionKind, SessionStatus
from proxy.records.binary import CONTENT_TYPE, encode_record
from proxy.routing.router import Router
from proxy.sampling import check_pinned
from proxy.serving.forwarding import send_to_holder, was_forwarded
from proxy.serving.ownership import Deliveries
from proxy.serving.sessions import Sessions
from proxy.store.protocol import SessionFilter, Store

MAX_WAIT_S = 300.0
"""Longest wait of a long poll, after which the caller repeats it."""


class ControlPlane:
    """One handler per entry of `ROUTES`."""

    def __init__(
        self,
        listen: ListenConfig,
        limits: LimitsConfig,
        sessions: Sessions,
        store: Store,
        router: Router,
        metrics: Metrics,
        make_engine: Callable[[EngineConfig], Engine],
        siblings: Siblings,
        deliveries: Deliveries,
        relay: RelayHub | None,
        marked: Callable[[str], Awaitable[None]],
        document: dict[str, Any],
    ) -> None:
        """`marked` returns when the rules are matched with a session. `document`: OpenAPI's."""
        self._listen = listen
        self._admin_keys = AdminKeys(listen)
        scrape = listen.metrics_key_file
        self._scrape_keys = None if scrape is None else KeyFile(scrape.expanduser())
        self._limits = limits
        self._sessions = sessions
        self._store = store
        self._router = router
        self._metrics = metrics
        self._make_engine = make_engine
        self._siblings = siblings
        self._deliveries = deliveries
        self._marked, self._document = marked, document
        self._weights, self._quotas = PublishedWeights(store, relay), SharedQuotas(store)
        self.policies = PublishedPolicies(store, router, self._weights)
        self._withdrawn = False
        self._handlers: dict[str, Callable[[web.Request], Awaitable[web.StreamResponse]]] = {
            "health": self._health,
            "ready": self._ready,
            "openapi": self._openapi,
            "show_metrics": self._show_metrics,
            "list": self._list,
            "create": self._create,
            "trajectories": self._trajectories,
            "events": self._events,
            "reward": self._reward,
            "complete": self._complete,
            "show": self._show,
            "delete": self._delete,
            "engines": self._engines,
            "pause": self._pause,
            "resume": self._resume,
            "add_engine": self._add_engine,
            "remove_engine": self._remove_engine,
            "set_version": self._set_version,
            "publish_policy": self._publish_policy,
            "release_policy": self._release_policy,
            **self._quotas.handlers,
            "publish_weights": self._weights.publish,
            "held_types": self._weights.held_types,
            "show_weights": self._weights.show,
            "release_weights": self._weights.release,
        }

    def withdraw(self) -> None:
        """Makes `/ready` return 503 from now on."""
        self._withdrawn = True

    async def handle(self, name: str, request: web.Request) -> web.StreamResponse:
        """Runs the handler of a route in `ROUTES`."""
        status = audit.FAILED
        try:
            if not OPERATIONS[name].open_to_all:
                self._authorise(name, api_key(request.headers) or "")
            response = await self._handlers[name](request)
            if name in _REPEATED_AT_SIBLINGS:
                await self._siblings.send(request)
            status = response.status
        except ProxyError as error:
            response, status = _refused(error), error.status
        except asyncio.CancelledError:
            status = audit.CLIENT_LEFT
            raise
        finally:
            audit.record(request, name, status)
        return response

    def _authorise(self, name: str, key: str) -> None:
        scrape_keys = self._scrape_keys if name == "show_metrics" else None
        if scrape_keys is None or not scrape_keys.accepts(key):
            self._admin_keys.check(key)

    async def _create(self, request: web.Request) -> web.Response:
        trial_id = request.match_info.get("trial_id")
        new = await with_origin(self._store, parsed(NewSession, await read_body(request)))
        await self._quotas.check(new.limits.quota)
        session, key = await self._sessions.create(
            new.trial_id if trial_id is None else trial_id,
            kind=new.kind or self._default_kind(),
            sampling=check_pinned(new.sampling)
            | ({"policies": new.policies} if new.policies else {}),
            profile=new.profile,
            limits=new.limits.model_dump(exclude_none=True),
            metadata=new.metadata,
            ttl_s=new.ttl_s,
            origin=None if new.branch_of is None else new.branch_of.origin,
        )
        request[audit.TRIAL_ID] = session.session_id
        root = self._public_url(request)
        return _json(
            {
                "trial_id": session.session_id,
                "api_key": key,
                "base_url": f"{root}/{session.session_id}/v1",
                "anthropic_base_url": f"{root}/{session.session_id}",
                "expires_at": session.expires_at,
            },
            status=201,
        )

    def _default_kind(self) -> SessionKind:
        infos = self._router.infos
        return SessionKind.EVAL if infos and all(i.text_only for i in infos) else SessionKind.TRAIN

    async def _list(self, request: web.Request) -> web.Response:
        query = request.query
        where = SessionFilter(
            status=_choice(query.get("status"), SessionStatus, "status"),
            kind=_choice(query.get("kind"), SessionKind, "kind"),
            id_prefix=query.get("id_prefix", ""),
            marked=query.get("marked"),
            after=query.get("after"),
            limit=int(bounded_number(query.get("limit", "100"), "limit", 1, 1000)),
        )
        sessions = await self._store.list_sessions(where)
        return _json({"sessions": [session_view(session) for session in sessions]})

    async def _show(self, request: web.Request) -> web.Response:
        session = await self._session(request)
        turns = await self._store.get_turns(session.session_id)
        return _json(
            {
                **session_view(session),
                "replay": await replay_view(self._store, session, turns),
                "turns": [turn_view(session.session_id, turn) for turn in turns],
            }
        )

    async def _trajectories(self, request: web.Request) -> web.Response:
        session = await self._session(request)
        turns = await self._store.get_turns(session.session_id)
        if CONTENT_TYPE in request.headers.get("Accept", ""):
            return web.Response(body=encode_record(session, turns), content_type=CONTENT_TYPE)
        return _json({**session_view(session), "trajectories": trajectories_view(turns)})

    async def _reward(self, request: web.Request) -> web.Response:
        session = await self._session(request)
        reward = Reward(**dict(parsed(NewReward, await read_body(request))))
        if reward.turn is not None:
            turns = await self._store.get_turns(session.session_id)
            if reward.turn >= len(turns):
                raise RequestError(
                    f"turn: {reward.turn} does not exist; the session has {len(turns)} turns",
                    param="turn",
                )
        added = await self._store.add_reward(session.session_id, reward)
        if added:
            live = await self._sessions.get(session.session_id)
            await self._sessions.record_event(live, "reward", key=reward.key, value=reward.value)
        return _json({"added": added})

    async def _complete(self, request: web.Request) -> web.Response:
        response = await self._end(request, "completed", self._sessions.complete)
        if not (is_from_sibling(request) or was_forwarded(request)):
            await self._marked(_trial_id(request))
        return response

    async def _delete(self, request: web.Request) -> web.Response:
        return await self._end(request, "deleted", self._sessions.delete)

    async def _end(
        self, request: web.Request, kind: str, end: Callable[[str], Awaitable[None]]
    ) -> web.Response:
        """Ends a session and cuts its calls in flight, also those of another proxy on the store."""
        trial_id = _trial_id(request)
        await self._deliveries.flush()
        if is_from_sibling(request) or was_forwarded(request):
            self._sessions.ended_elsewhere(trial_id, kind)
            return _json({})
        holder = await self._store.holder(trial_id)
        await end(trial_id)
        if holder is not None:
            await send_to_holder(request, holder)
        return _json({})

    async def _events(self, request: web.Request) -> web.StreamResponse:
        live = await self._sessions.get(_trial_id(request))
        if request.query.get("wait") == "completed":
            wait_s = bounded_number(request.query.get("timeout_s", "60"), "timeout_s", 0, 1e9)
            await self._session(request)
            wait_s, again_s = min(wait_s, MAX_WAIT_S), self._limits.keep_alive_s
            return _json({"completed": await ends_within(live, self._store, wait_s, again_s)})
        since = int(bounded_number(request.query.get("since", "0"), "since", 0, 2**53))
        if "text/event-stream" in request.headers.get("Accept", ""):
            stream = EventStream(live, self._store, self._siblings, self._limits.keep_alive_s)
            return await stream.answer(request, since)
        return _json({"events": await self._store.get_events(live.session.session_id, since)})

    async def _engines(self, request: web.Request) -> web.Response:
        engines = [asdict(info) for info in self._router.infos]
        policies = [asdict(served) for served in self._router.policies.published]
        return _json({"engines": engines, "policies": policies, "paused": self._router.paused})

    async def _add_engine(self, request: web.Request) -> web.Response:
        new = parsed(NewEngine, await read_body(request))
        try:
            engine = self._make_engine(EngineConfig.model_validate(new.model_dump()))
        except ConfigurationError as error:
            raise RequestError(error.message, param="url") from error
        await self._router.add(engine)
        return _json({"name": engine.info.name}, status=201)

    async def _remove_engine(self, request: web.Request) -> web.Response:
        await self._router.remove(request.match_info["name"])
        return _json({})

    async def _pause(self, request: web.Request) -> web.Response:
        self._router.pause()
        return _json({"paused": True})

    async def _resume(self, request: web.Request) -> web.Response:
        self._router.resume()
        return _json({"paused": False})

    async def _set_version(self, request: web.Request) -> web.Response:
        version = parsed(Version, await read_body(request)).version
        self._router.set_version(version)
        return _json({"version": version})

    async def _publish_policy(self, request: web.Request) -> web.Response:
        return _json(asdict(await self.policies.publish(request)))

    async def _release_policy(self, request: web.Request) -> web.Response:
        await self.policies.release(request)
        return _json({})

    async def _show_metrics(self, request: web.Request) -> web.Response:
        others = await self._siblings.ask(request)
        return web.Response(body=self._metrics.exposition(others), content_type="text/plain")

    async def _health(self, request: web.Request) -> web.Response:
        return _json({"status": "ok"})

    async def _openapi(self, request: web.Request) -> web.Response:
        return _json(self._document)

    async def _ready(self, request: web.Request) -> web.Response:
        try:
            if self._withdrawn:
                raise EngineError("the proxy is stopping")
            await self._router.check()
            await self._store.list_sessions(SessionFilter(limit=1))
            return _json({"status": "ready"})
        except ProxyError as error:
            return _refused(error)

    async def _session(self, request: web.Request) -> Session:
        session = await self._store.get_session(_trial_id(request))
        if session is None:
            raise SessionError(f"session {_trial_id(request)!r} does not exist", status=404)
        return session

    def _public_url(self, request: web.Request) -> str:
        if self._listen.public_url is not None:
            return self._listen.public_url.rstrip("/")
        return str(request.url.origin())


_NAMED = r"/sessions/{trial_id:[\s\S]+?}"  # also matches line breaks
ROUTES = (
    ("GET", "/health", "health"),
    ("GET", "/ready", "ready"),
    ("GET", "/openapi.json", "openapi"),
    ("GET", "/metrics", "show_metrics"),
    ("GET", "/sessions", "list"),
    ("POST", "/sessions", "create"),
    ("GET", _NAMED + "/trajectories", "trajectories"),
    ("GET", _NAMED + "/events", "events"),
    ("POST", _NAMED + "/rewards", "reward"),
    ("POST", _NAMED + "/complete", "complete"),
    ("GET", _NAMED, "show"),
    ("POST", _NAMED, "create"),
    ("DELETE", _NAMED, "delete"),
    ("GET", "/engines", "engines"),
    ("POST", "/engines/pause", "pause"),
    ("POST", "/engines/resume", "resume"),
    ("POST", "/engines", "add_engine"),
    ("DELETE", "/engines/{name}", "remove_engine"),
    ("PUT", "/policy_version", "set_version"),
    ("PUT", "/policies/{name}/version", "publish_policy"),
    ("DELETE", "/policies/{name}/runs/{run}", "release_policy"),
    ("PUT", "/quotas/{name}", "set_quota"),
    ("GET", "/quotas", "quotas"),
    ("DELETE", "/quotas/{name}", "remove_quota"),
    ("PUT", "/weights", "publish_weights"),
    ("POST", "/weights/types", "held_types"),
    ("GET", "/weights", "show_weights"),
    ("DELETE", "/weights/runs/{run}", "release_weights"),
)
_REPEATED_AT_SIBLINGS = frozenset(
    {"complete", "delete", "pause", "resume", "add_engine", "remove_engine", "set_version"}
    | {"publish_policy"}
)


def _trial_id(request: web.Request) -> str:
    return request.match_info["trial_id"]


def _choice(value: str | None, kind: Any, name: str) -> Any:
    if value is None:
        return None
    try:
        return kind(value)
    except ValueError as error:
        raise RequestError(f"{name}: {value!r} is not one of {', '.join(kind)}") from error


def _json(data: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(
        body=orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY),
        status=status,
        content_type="application/json",
    )


def _refused(error: ProxyError) -> web.Response:
    response = _json({"error": {"message": error.message}}, status=error.status)
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    return response
