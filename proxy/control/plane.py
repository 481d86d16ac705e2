"""The control plane: sessions, their records and rewards, events, engines, versions.

Each handler declares its route (`proxy.http.route`); `door` checks who calls it. Invariant: an API
key appears only in the answer that creates it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

import shortuuid
from aiohttp import web

from proxy.config import EngineConfig, LimitsConfig, ListenConfig
from proxy.control import audit, schema
from proxy.control.branch_request import with_origin
from proxy.control.door import json_answer, refused
from proxy.control.event_stream import EventStream, ends_within
from proxy.control.policies import PublishedPolicies
from proxy.control.record_view import session_view, trajectories_view, turn_view
from proxy.control.replay_view import replay_view
from proxy.control.schema import parsed
from proxy.control.siblings import Siblings, is_from_sibling
from proxy.engines.protocol import Engine, EngineInfo
from proxy.errors import (
    ConfigurationError,
    EngineError,
    ProxyError,
    RequestError,
    SessionError,
    StoreError,
)
from proxy.http.openapi import Nothing
from proxy.http.route import Who, route
from proxy.http.server import bounded_number, read_body
from proxy.metrics import Metrics
from proxy.person_keys import PERSON, SCOPE, Scope
from proxy.records import Reward, Session, SessionKind, SessionStatus
from proxy.records.binary import CONTENT_TYPE, encode_record
from proxy.routing.router import Router
from proxy.sampling import check_pinned
from proxy.serving.forwarding import send_to_holder, was_forwarded
from proxy.serving.ownership import Deliveries
from proxy.serving.sessions import Sessions
from proxy.store import curation
from proxy.store.protocol import SessionFilter, Store
from proxy.wire.images import MEDIA_TYPES

MAX_WAIT_S = 300.0
"""Longest wait of a long poll, after which the caller repeats it."""
STORE_S = 2.0
"""Seconds that `/ready` and `/metrics` wait for the store: less than probes and scrapes do."""
_NAMED = r"/sessions/{trial_id:[\s\S]+?}"  # also matches line breaks
_TEXT, _NUMBER, _COUNT = {"type": "string"}, {"type": "number"}, {"type": "integer"}
_FILTER = {
    "status": _TEXT,
    "kind": _TEXT,
    "id_prefix": _TEXT,
    "marked": _TEXT,
    "after": _TEXT,
    "limit": _COUNT,
}
_FOLLOW = {"wait": {"const": "completed"}, "timeout_s": _NUMBER, "since": _COUNT}


class ControlPlane:
    """The handlers of sessions, engines and versions."""

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
        policies: PublishedPolicies,
        on_create: Callable[[Mapping[str, Any]], Awaitable[None]],
        policies_of: Callable[[Mapping[str, Any]], Awaitable[Mapping[str, str]]],
        on_end: Callable[[str], Awaitable[None]],
        document: Callable[[], dict[str, Any]],
    ) -> None:
        """`on_create`, `policies_of` and `on_end` are the hooks of the extras; `document` makes
        OpenAPI's."""
        self._listen = listen
        self._limits = limits
        self._sessions = sessions
        self._store = store
        self._router = router
        self._metrics = metrics
        self._make_engine = make_engine
        self._siblings = siblings
        self._deliveries = deliveries
        self._on_create, self._on_end, self._document = on_create, on_end, document
        self._policies_of = policies_of
        self.policies = policies
        self._withdrawn = False
        self._store_bytes: int | None = None
        self._measure(metrics)

    def _measure(self, metrics: Metrics) -> None:
        """Adds gauges of the engines, of waiting calls and of the store."""
        readings: dict[str, tuple[str, Callable[[EngineInfo], float | None]]] = {
            "engine_up": ("1: the engine answers", lambda info: float(info.healthy)),
            "engine_version": ("Version of its weights", lambda info: info.version),
            "engine_queued_calls": ("Calls in its queue", lambda info: info.details.get("queued")),
            "engine_cache_used": (
                "Used share of its cache",
                lambda info: info.details.get("cache_used"),
            ),
        }
        for name, (words, read) in readings.items():
            metrics.gauges(name, words, ("engine",), partial(self._of_engines, read), shared=True)
        metrics.gauges(
            "engine_calls",
            "Calls in flight at an engine",
            ("engine",),
            partial(self._of_engines, lambda info: info.in_flight),
            shared=False,
        )
        metrics.gauge(
            "waiting_calls", "Calls that wait for an engine", lambda: self._router.waiting
        )
        metrics.gauges(
            "store_bytes",
            "Size of the record, if the store knows it",
            (),
            lambda: [] if self._store_bytes is None else [((), self._store_bytes)],
            shared=True,
        )

    def _of_engines(
        self, read: Callable[[EngineInfo], float | None]
    ) -> Iterator[tuple[tuple[str], float]]:
        for info in self._router.infos:
            if (value := read(info)) is not None:
                yield (info.name,), value

    def withdraw(self) -> None:
        """Makes `/ready` return 503 from now on."""
        self._withdrawn = True

    @route(
        "POST",
        "/sessions",
        _NAMED,
        summary="Creates a session, or a branch of one",
        own=True,
        answer=schema.SessionCreated,
        takes=schema.NewSession,
        status=201,
        refusals=(400, 404, 409),
    )
    async def _create(self, request: web.Request) -> web.Response:
        trial_id = request.match_info.get("trial_id")
        new = parsed(schema.NewSession, await read_body(request))
        trial_id = new.trial_id if trial_id is None else trial_id
        if (scope := request[SCOPE]).person:
            trial_id, new = _of_person(scope, trial_id, new)
        new = await with_origin(self._store, new)
        limits = new.limits.model_dump(exclude_none=True)
        await self._on_create(limits)
        kind, policies = new.kind or self._default_kind(), new.policies
        if not policies and new.branch_of is None and kind is SessionKind.TRAIN:
            policies = dict(await self._policies_of(new.metadata))
        session, key = await self._sessions.create(
            trial_id,
            kind=kind,
            sampling=check_pinned(new.sampling, kind)
            | ({"policies": policies} if policies else {}),
            profile=new.profile,
            limits=limits,
            metadata=new.metadata,
            ttl_s=new.ttl_s,
            origin=None if new.branch_of is None else new.branch_of.origin,
        )
        request[audit.TRIAL_ID] = session.session_id
        root = self._public_url(request)
        return json_answer(
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

    @route(
        "GET",
        "/sessions",
        summary="Lists sessions in order of their ids",
        own=True,
        answer=schema.SessionList,
        query=_FILTER,
        refusals=(400,),
    )
    async def _list(self, request: web.Request) -> web.Response:
        query = request.query
        prefix = request[SCOPE].narrowed(query.get("id_prefix", ""))
        if prefix is None:
            return json_answer({"sessions": []})
        where = SessionFilter(
            status=_choice(query.get("status"), SessionStatus, "status"),
            kind=_choice(query.get("kind"), SessionKind, "kind"),
            id_prefix=prefix,
            marked=query.get("marked"),
            after=query.get("after"),
            limit=int(bounded_number(query.get("limit", "100"), "limit", 1, 1000)),
        )
        sessions = await self._store.list_sessions(where)
        return json_answer({"sessions": [session_view(session) for session in sessions]})

    @route(
        "GET",
        _NAMED,
        summary="A session with its turns, forks and rewards",
        own=True,
        answer=schema.SessionRecord,
        refusals=(404,),
    )
    async def _show(self, request: web.Request) -> web.Response:
        session = await self._session(request)
        turns = await self._store.get_turns(session.session_id)
        return json_answer(
            {
                **session_view(session),
                "replay": await replay_view(self._store, session, turns),
                "turns": [turn_view(session.session_id, turn) for turn in turns],
            }
        )

    @route(
        "GET",
        _NAMED + "/trajectories",
        summary="Every path through the token tree",
        own=True,
        answer=schema.SessionTrajectories,
        refusals=(404,),
        other_types=(CONTENT_TYPE,),
    )
    async def _trajectories(self, request: web.Request) -> web.Response:
        session = await self._session(request)
        turns = await self._store.get_turns(session.session_id)
        if CONTENT_TYPE in request.headers.get("Accept", ""):
            return web.Response(body=encode_record(session, turns), content_type=CONTENT_TYPE)
        return json_answer({**session_view(session), "trajectories": trajectories_view(turns)})

    @route(
        "GET",
        _NAMED + "/images/{sha256:[0-9a-f]+}",
        summary="An image of a turn, as the agent sent it",
        own=True,
        refusals=(404,),
        other_types=MEDIA_TYPES,
    )
    async def _session_image(self, request: web.Request) -> web.Response:
        session, sha256 = await self._session(request), request.match_info["sha256"]
        turns = await self._store.get_turns(session.session_id)
        named = any(image.sha256 == sha256 for turn in turns for image in turn.images)
        image = await self._store.get_image(sha256) if named else None
        if image is None:
            raise SessionError(f"no turn of the session has the image {sha256}", status=404)
        alone = {"X-Content-Type-Options": "nosniff", "Content-Security-Policy": "sandbox"}
        return web.Response(body=image.data, content_type=image.media_type, headers=alone)

    @route(
        "POST",
        _NAMED + "/rewards",
        summary="Adds a reward, once per key",
        own=True,
        answer=schema.Added,
        takes=schema.NewReward,
        refusals=(400, 404),
    )
    async def _reward(self, request: web.Request) -> web.Response:
        session = await self._session(request)
        reward = Reward(**dict(parsed(schema.NewReward, await read_body(request))))
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
        return json_answer({"added": added})

    @route(
        "POST",
        _NAMED + "/curation",
        summary="Keeps a person's rating, which may change, and tags",
        own=True,
        answer=Nothing,
        takes=schema.Curation,
        refusals=(400, 404),
    )
    async def _curate(self, request: web.Request) -> web.Response:
        said = parsed(schema.Curation, await read_body(request))
        request[SCOPE].check_tags(said.tags)
        try:
            await curation.keep(self._store, _trial_id(request), **dict(said))
        except ValueError as error:
            raise RequestError(str(error)) from None
        return json_answer({})

    @route(
        "POST",
        _NAMED + "/complete",
        summary="Ends a session: later calls get 409, calls in flight are cut",
        own=True,
        answer=Nothing,
        refusals=(404, 503),
        everywhere=True,
    )
    async def _complete(self, request: web.Request) -> web.Response:
        response = await self._end(request, "completed", self._sessions.complete)
        if not (is_from_sibling(request) or was_forwarded(request)):
            await self._on_end(_trial_id(request))
        return response

    @route(
        "DELETE",
        _NAMED,
        summary="Removes a session and its record",
        own=True,
        answer=Nothing,
        refusals=(404, 409, 503),
        everywhere=True,
    )
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
            return json_answer({})
        holder = await self._store.holder(trial_id)
        await end(trial_id)
        if holder is not None:
            await send_to_holder(request, holder)
        return json_answer({})

    @route(
        "GET",
        _NAMED + "/events",
        summary="Past events or a stream of new ones; with `wait`, whether the session has ended",
        own=True,
        answer=schema.Events,
        refusals=(400, 404),
        query=_FOLLOW,
        other_types=("text/event-stream",),
    )
    async def _events(self, request: web.Request) -> web.StreamResponse:
        live = await self._sessions.get(_trial_id(request))
        if request.query.get("wait") == "completed":
            wait_s = bounded_number(request.query.get("timeout_s", "60"), "timeout_s", 0, 1e9)
            await self._session(request)
            wait_s, again_s = min(wait_s, MAX_WAIT_S), self._limits.keep_alive_s
            return json_answer({"completed": await ends_within(live, self._store, wait_s, again_s)})
        since = int(bounded_number(request.query.get("since", "0"), "since", 0, 2**53))
        if "text/event-stream" in request.headers.get("Accept", ""):
            stream = EventStream(live, self._store, self._siblings, self._limits.keep_alive_s)
            return await stream.answer(request, since)
        return json_answer({"events": await self._store.get_events(live.session.session_id, since)})

    @route(
        "GET",
        "/engines",
        summary="Lists the engines",
        answer=schema.Engines,
    )
    async def _engines(self, request: web.Request) -> web.Response:
        engines = [asdict(info) for info in self._router.infos]
        policies = [asdict(served) for served in self._router.policies.published]
        return json_answer(
            {"engines": engines, "policies": policies, "paused": self._router.paused}
        )

    @route(
        "POST",
        "/engines",
        summary="Adds an engine",
        answer=schema.EngineAdded,
        takes=schema.NewEngine,
        status=201,
        refusals=(400, 409),
        everywhere=True,
    )
    async def _add_engine(self, request: web.Request) -> web.Response:
        new = parsed(schema.NewEngine, await read_body(request))
        try:
            engine = self._make_engine(EngineConfig.model_validate(new.model_dump()))
        except ConfigurationError as error:
            raise RequestError(error.message, param="url") from error
        await self._router.add(engine)
        return json_answer({"name": engine.info.name}, status=201)

    @route(
        "DELETE",
        "/engines/{name}",
        summary="Removes an engine; it gets no new calls",
        answer=Nothing,
        refusals=(404,),
        everywhere=True,
    )
    async def _remove_engine(self, request: web.Request) -> web.Response:
        await self._router.remove(request.match_info["name"])
        return json_answer({})

    @route(
        "POST",
        "/engines/pause",
        summary="Makes calls that have not begun wait",
        answer=schema.Paused,
        everywhere=True,
    )
    async def _pause(self, request: web.Request) -> web.Response:
        self._router.pause()
        return json_answer({"paused": True})

    @route(
        "POST",
        "/engines/resume",
        summary="Lets waiting calls continue",
        answer=schema.Paused,
        everywhere=True,
    )
    async def _resume(self, request: web.Request) -> web.Response:
        self._router.resume()
        return json_answer({"paused": False})

    @route(
        "PUT",
        "/policy_version",
        summary="Sets the version of the weights",
        answer=schema.Version,
        takes=schema.Version,
        refusals=(400,),
        everywhere=True,
    )
    async def _set_version(self, request: web.Request) -> web.Response:
        version = parsed(schema.Version, await read_body(request)).version
        self._router.set_version(version)
        return json_answer({"version": version})

    @route(
        "PUT",
        "/policies/{name}/version",
        summary="Makes an adapter the current version of a policy; running calls continue with it",
        answer=schema.PolicyView,
        takes=schema.PolicyVersion,
        refusals=(400, 409),
        everywhere=True,
    )
    async def _publish_policy(self, request: web.Request) -> web.Response:
        return json_answer(asdict(await self.policies.publish(request)))

    @route(
        "DELETE",
        "/policies/{name}/runs/{run}",
        summary="Lets other runs publish a policy, if it belongs to this run",
        answer=Nothing,
        refusals=(400,),
    )
    async def _release_policy(self, request: web.Request) -> web.Response:
        await self.policies.release(request)
        return json_answer({})

    @route(
        "GET",
        "/metrics",
        who=Who.SCRAPER,
        summary="Prometheus metrics of all processes",
        other_types=("text/plain",),
    )
    async def _show_metrics(self, request: web.Request) -> web.Response:
        others = await self._siblings.ask(request)
        # The counters are worth more than the store's size.
        with suppress(StoreError, TimeoutError):
            async with asyncio.timeout(STORE_S):
                self._store_bytes = await self._store.used_bytes()
        return web.Response(body=self._metrics.exposition(others), content_type="text/plain")

    @route(
        "GET",
        "/health",
        who=Who.ANYONE,
        summary="Whether the process lives",
        answer=schema.ProcessStatus,
    )
    async def _health(self, request: web.Request) -> web.Response:
        return json_answer({"status": "ok"})

    @route(
        "GET",
        "/openapi.json",
        who=Who.ANYONE,
        summary="This document",
        other_types=("application/json",),
    )
    async def _openapi(self, request: web.Request) -> web.Response:
        return json_answer(self._document())

    @route(
        "GET",
        "/ready",
        who=Who.ANYONE,
        summary="Whether calls can be answered",
        answer=schema.ProcessStatus,
        refusals=(503,),
    )
    async def _ready(self, request: web.Request) -> web.Response:
        try:
            if self._withdrawn:
                raise EngineError("the proxy is stopping")
            await self._router.check()
            async with asyncio.timeout(STORE_S):
                await self._store.list_sessions(SessionFilter(limit=1))
            return json_answer({"status": "ready"})
        except TimeoutError:
            return refused(StoreError(f"the store did not answer within {STORE_S:.0f} s"))
        except ProxyError as error:
            return refused(error)

    async def _session(self, request: web.Request) -> Session:
        session = await self._store.get_session(_trial_id(request))
        if session is None:
            raise SessionError(f"session {_trial_id(request)!r} does not exist", status=404)
        return session

    def _public_url(self, request: web.Request) -> str:
        if self._listen.public_url is not None:
            return self._listen.public_url.rstrip("/")
        return str(request.url.origin())


def _of_person(
    scope: Scope, trial_id: str | None, new: schema.NewSession
) -> tuple[str, schema.NewSession]:
    """The id of a person's new session, and the session with the person's name.

    Raises:
        SessionError: 404, the id or the session that it begins with is not the person's; 403, it
            chooses the policy, which may be another person's.
    """
    trial_id = f"{scope.prefix}{shortuuid.uuid()}" if trial_id is None else trial_id
    scope.check(trial_id)
    if new.branch_of is not None:
        scope.check(new.branch_of.session)
    if new.policies:
        raise SessionError("policies: only the administrator chooses them", status=403)
    return trial_id, new.model_copy(update={"metadata": {**new.metadata, PERSON: scope.person}})


def _trial_id(request: web.Request) -> str:
    return request.match_info["trial_id"]


def _choice(value: str | None, kind: Any, name: str) -> Any:
    if value is None:
        return None
    try:
        return kind(value)
    except ValueError as error:
        raise RequestError(f"{name}: {value!r} is not one of {', '.join(kind)}") from error
