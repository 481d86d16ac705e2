"""The swarm over HTTP.

    GET    /health            200 while the server answers (no token, any Host)
    GET    /ready             200 while the engine is up, else 503 (no token, any Host)
    GET    /metrics           for Prometheus
    GET    /v1/status         ?since=&wait_s=   long-poll for the next change
    GET    /v1/events         every change, as server-sent events
    GET/PUT /v1/config        the trainer's YAML, as text; PUT while offline or in error. After
                              another text, or ?fresh, the next start begins a new run
    POST   /v1/start /v1/stop start resumes the last run from its checkpoint, if there is one
    POST   /v1/agree          {client_id}
    POST   /v1/episodes       claim → 201; 429 throttled, 409 not rolling (after wait_s)
    GET    /v1/episodes       the open and collected episodes
    GET    /v1/tasks          ?limit=  what became of each task's episodes
    POST   /v1/episodes/{id}/heartbeat | prepare | end | abort     header X-Episode-Key: the claim's
    GET    /v1/episodes/{id}/outcome   for the server of another swarm, which has only that key
    POST   /trainer/hello | next_batch | trained    GET /trainer/records/{id}     the trainer's key

Invariant: every route but the two probes needs the swarm's token (the trainer's routes need the
trainer's key), an episode's routes also need its claim's key, and browsers are refused
(`proxy/http/web_guard.py`). Errors are `{"error": {"code", "message"}}`. The server stores the
configuration as text. Only the trainer parses it, and its hello reports the sections that the
server needs.
"""

from __future__ import annotations

import hmac
import math
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from agent_loop.extras.swarm.errors import SwarmError
from agent_loop.extras.swarm.joint import EPISODE_KEY
from agent_loop.extras.swarm.metrics import exposition
from agent_loop.extras.swarm.swarm import Swarm
from agent_loop.extras.swarm.table import EpisodeTable
from agent_loop.extras.swarm.wire import (
    Abort,
    Agree,
    Claim,
    ConfigText,
    EngineState,
    EpisodeEnd,
    EpisodeOutcome,
    Prepare,
    Trained,
    TrainerHello,
    TrainerReady,
    TrainerWelcome,
)
from proxy.client import ProxyClient
from proxy.errors import RequestError
from proxy.http.server import answer_expect, read_body
from proxy.http.web_guard import PROBES, Hosts, web_guard

MAX_WAIT_S = 60.0
KEEP_ALIVE_S = 15.0
MAX_BODY_BYTES = 4 * 2**20
MAX_LISTED = 10_000
MAX_DIGITS = 18
"""Maximum number of digits of an event's number."""
MAX_REASON = 500
"""Maximum number of characters of an abort's reason; the rest is cut off."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Model = TypeVar("Model", bound=BaseModel)


class TrainerControl(Protocol):
    """What starts and stops the trainer: `TrainerProcess`."""

    async def start(self, run_dir: str) -> None:
        """Resumes the run in `run_dir`; empty: begins a new run."""
        ...

    async def stop(self) -> None: ...


@dataclass(slots=True)
class SwarmServer:
    """What the routes share."""

    swarm: Swarm
    engine: TrainerControl
    table: EpisodeTable
    token: str
    config: Path
    """The trainer's YAML; each start reads it."""
    hosts: Hosts
    trainer_key: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    _proxy: ProxyClient | None = None

    def build_app(self) -> web.Application:
        app = web.Application(
            middlewares=[web_guard(self.hosts), _errors, self._authorized],
            client_max_size=MAX_BODY_BYTES,
        )
        app.cleanup_ctx.append(self._life)
        episode = "/v1/episodes/{episode_id}"
        routes = [
            web.get("/health", self._health),
            web.get("/ready", self._ready),
            web.get("/metrics", self._metrics),
            web.get("/v1/status", self._status),
            web.get("/v1/events", self._events),
            web.get("/v1/config", self._get_config),
            web.put("/v1/config", self._put_config),
            web.post("/v1/start", self._start),
            web.post("/v1/stop", self._stop),
            web.post("/v1/agree", self._agree),
            web.post("/v1/episodes", self._claim),
            web.get("/v1/episodes", self._episodes),
            web.get("/v1/tasks", self._tasks),
            web.post(f"{episode}/heartbeat", self._heartbeat),
            web.post(f"{episode}/prepare", self._prepare),
            web.get(f"{episode}/outcome", self._outcome),
            web.post(f"{episode}/end", self._end),
            web.post(f"{episode}/abort", self._abort),
            web.post("/trainer/hello", self._hello),
            web.post("/trainer/next_batch", self._next_batch),
            web.post("/trainer/trained", self._trained),
            web.get("/trainer/records/{episode_id}", self._record),
            web.route("*", r"/{path:[\s\S]*}", self._no_route),
        ]
        for route in routes:
            app.router.add_route(
                route.method, route.path, route.handler, expect_handler=answer_expect
            )
        return app

    async def _life(self, _: web.Application) -> AsyncIterator[None]:
        await self.swarm.open()
        yield
        await self.engine.stop()
        await self.swarm.close()
        if self._proxy is not None:
            await self._proxy.close()

    @web.middleware
    async def _authorized(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method == "GET" and request.path.endswith("/outcome"):
            return await handler(request)  # the handler asks for the episode's key
        if request.path in PROBES:
            return await handler(request)
        for_trainer = request.path.startswith("/trainer/")
        wanted = self.trainer_key if for_trainer else self.token
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        if scheme != "Bearer" or not hmac.compare_digest(given.encode(), wanted.encode()):
            raise SwarmError(
                "missing or wrong token: set AGENTIC_SWARM_TOKEN to the server's token; unless the "
                "server was given one, it is in the file `token` of its state folder",
                "unauthorized",
            )
        return await handler(request)

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"state": self.swarm.state.value})

    async def _ready(self, _: web.Request) -> web.Response:
        state = self.swarm.state
        is_up = state.has_engine and state is not EngineState.BOOTING
        return web.json_response({"state": state.value}, status=200 if is_up else 503)

    async def _metrics(self, _: web.Request) -> web.Response:
        waiting = self.swarm.episodes.admission.waiting
        text = exposition(await self.swarm.status(), waiting).decode()
        return web.Response(text=text, content_type="text/plain", charset="utf-8")

    async def _status(self, request: web.Request) -> web.Response:
        since = int(_number(request, "since", -1)) if "since" in request.query else None
        wait_s = min(MAX_WAIT_S, max(0.0, _number(request, "wait_s", 0)))
        return _answer(await self.swarm.status(since=since, wait_s=wait_s))

    async def _events(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        seen = request.headers.get("Last-Event-ID", "")
        is_number = seen.isascii() and seen.isdecimal() and len(seen) <= MAX_DIGITS
        last = int(seen) if is_number else -1
        while True:
            status = await self.swarm.status(since=last, wait_s=KEEP_ALIVE_S)
            if status.change == last:
                await response.write(b": keep-alive\n\n")
                continue
            last = status.change
            data = status.model_dump_json()
            await response.write(f"id: {last}\nevent: status\ndata: {data}\n\n".encode())

    async def _get_config(self, _: web.Request) -> web.Response:
        return web.Response(text=self._config_bytes().decode(errors="replace"))

    async def _put_config(self, request: web.Request) -> web.Response:
        if self.swarm.state.has_engine:
            raise SwarmError(f"the engine is {self.swarm.state.value}: stop it first", "state")
        wanted = await _body(request, ConfigText)
        config = wanted.config.encode()
        if config != self._config_bytes() or "fresh" in request.query:
            await self.swarm.set_run_dir("")
        self.config.write_bytes(config)
        return web.json_response({})

    async def _start(self, _: web.Request) -> web.Response:
        if not self.config.exists():
            raise SwarmError("no configuration yet: PUT /v1/config first", "state")
        await self.engine.start(await self.swarm.begin())
        return _answer(await self.swarm.status())

    async def _stop(self, _: web.Request) -> web.Response:
        await self.engine.stop()
        return _answer(await self.swarm.status())

    async def _agree(self, request: web.Request) -> web.Response:
        self.swarm.agree((await _body(request, Agree)).client_id)
        return _answer(await self.swarm.status())

    async def _claim(self, request: web.Request) -> web.Response:
        claimed = await self.swarm.claim(await _body(request, Claim))
        if request.transport is None or request.transport.is_closing():
            gone = "its client had gone before it got it"
            await self.swarm.episodes.abort(claimed.episode_id, claimed.key, gone)
        return _answer(claimed, status=201)

    async def _episodes(self, request: web.Request) -> web.Response:
        views = self.swarm.buffer(int(max(0, min(MAX_LISTED, _number(request, "limit", 1000)))))
        return web.json_response({"episodes": [view.model_dump(mode="json") for view in views]})

    async def _tasks(self, request: web.Request) -> web.Response:
        limit = int(max(1, min(MAX_LISTED, _number(request, "limit", 1000))))
        tasks = await self.table.tasks(limit)
        return web.json_response({"tasks": [task.model_dump() for task in tasks]})

    async def _heartbeat(self, request: web.Request) -> web.Response:
        return _answer(await self.swarm.heartbeat(*_claimed(request)))

    async def _prepare(self, request: web.Request) -> web.Response:
        wanted = await _body(request, Prepare)
        return _answer(await self.swarm.episodes.prepare(*_claimed(request), wanted))

    async def _outcome(self, request: web.Request) -> web.Response:
        return _answer(EpisodeOutcome(state=await self.swarm.episodes.outcome(*_claimed(request))))

    async def _end(self, request: web.Request) -> web.Response:
        return _answer(
            await self.swarm.episodes.end(*_claimed(request), await _body(request, EpisodeEnd))
        )

    async def _abort(self, request: web.Request) -> web.Response:
        reason = (await _body(request, Abort)).reason[:MAX_REASON]
        return _answer(await self.swarm.episodes.abort(*_claimed(request), reason))

    async def _hello(self, request: web.Request) -> web.Response:
        hello = await _body(request, TrainerHello)
        if self._proxy is not None:
            await self._proxy.close()
        self._proxy = ProxyClient(hello.proxy_url, hello.proxy_admin_key)
        return _answer(TrainerWelcome(generation=await self.swarm.hello(hello, self._proxy)))

    async def _next_batch(self, request: web.Request) -> web.Response:
        ready = await _body(request, TrainerReady)
        batch = await self.swarm.next_batch(ready.version, ready.wait_s)
        return web.Response(status=204) if batch is None else _answer(batch)

    async def _trained(self, request: web.Request) -> web.Response:
        await self.swarm.trained((await _body(request, Trained)).batch)
        return web.json_response({})

    async def _record(self, request: web.Request) -> web.StreamResponse:
        path = self.table.record_file(Path(request.match_info["episode_id"]).name)
        if not path.is_file():
            raise SwarmError(f"no recording of episode {path.stem!r}", "not_found")
        return web.FileResponse(path)

    async def _no_route(self, request: web.Request) -> web.StreamResponse:
        raise SwarmError(f"no route {request.method} {request.path[:200]}", "not_found")

    def _config_bytes(self) -> bytes:
        """As it was written, with its ends of lines."""
        return self.config.read_bytes() if self.config.exists() else b""


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except SwarmError as error:
        headers = {"Retry-After": "1"} if error.status in (429, 503) else {}
        body = {"error": {"code": error.code, "message": error.message}}
        return web.json_response(body, status=error.status, headers=headers)


async def _body(request: web.Request, kind: type[Model]) -> Model:
    try:
        return kind.model_validate_json(await read_body(request) or b"{}")
    except RequestError as error:
        raise SwarmError(error.message, "invalid") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise SwarmError(f"{where}: {first['msg']}" if where else first["msg"], "invalid") from None


def _number(request: web.Request, name: str, default: float) -> float:
    text = request.query.get(name)
    try:
        value = default if text is None else float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise SwarmError(f"{name}={text!r}: give a finite number", "invalid")
    return value


def _claimed(request: web.Request) -> tuple[str, str]:
    return request.match_info["episode_id"], request.headers.get(EPISODE_KEY, "")


def _answer(model: BaseModel, *, status: int = 200) -> web.Response:
    return web.json_response(text=model.model_dump_json(), status=status)
