"""The extra of learners: gives sessions their adapters, and serves each learner what it may read.

Invariant: with a learner's key, a session that has not opted in does not exist, and nothing of the
control plane opens. A session gets an adapter when it is created, and keeps it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from aiohttp import web
from pydantic import Field

from proxy.control.door import json_answer, refused
from proxy.control.record_view import session_view
from proxy.control.schema import parsed
from proxy.engines import guard
from proxy.errors import ConfigurationError, ProxyError, RequestError, SessionError
from proxy.extra import Core, Extra, ExtraConfig
from proxy.extras.learn.assignment import MAX_SWITCHES, Assignment
from proxy.extras.learn.consent import has_consented
from proxy.extras.learn.section import Recorder, make_folder
from proxy.http.openapi import Schema
from proxy.http.route import Route, Who, route, routes_of
from proxy.http.server import api_key, read_body
from proxy.keys import KeyFile, kept_key
from proxy.machine.file_lock import is_locked
from proxy.person_keys import EVERYTHING, PERSON, SCOPE
from proxy.records import ServedPolicy, Session, SessionKind, SessionStatus
from proxy.records.binary import CONTENT_TYPE, encode_record
from proxy.store import curation
from proxy.store.protocol import SessionFilter

LEARNED = "learned"
"""The entry of a session's metadata with what the learner has decided, and why."""
LOCK = "run.lock"
"""The file in a learner's folder that its process locks."""
PAGE = 200
STOP_GRACE_S = 30.0
"""Seconds in which a learner ends its update."""
_TRAIN = "import sys; from trainer.cli import main; sys.exit(main())"
_OF = "/learn/{policy}"
_HIDDEN: dict[str, Any] = {"who": Who.LEARNER, "documented": False}


class NewAdapter(Schema):
    """Body of `PUT /learn/{policy}/adapters/{number}`."""

    adapter: str
    """The engines' name of the adapter."""


class NewAssignment(Schema):
    """Body of `PUT /learn/{policy}/assignment`."""

    stable: int = Field(ge=0)
    canary: int | None = Field(None, ge=1)
    share: float = Field(0.0, ge=0, le=1)
    done: str = ""
    """The order that this carries out."""
    told: str = ""
    """The last switch that the learner's journal has."""


class Order(Schema):
    """Body of `PUT /learn/{policy}/order`."""

    order: Literal["promote", "rollback", "freeze", "thaw"]


class Decision(Schema):
    """Body of `PUT /learn/{policy}/decision`."""

    text: str = Field(max_length=curation.MAX_VALUE_CHARS)


class Learning(Extra):
    """Example: Learning([Recorder(policy="work", folders=(Path("~/code"),))])"""

    def __init__(self, recorders: Sequence[Recorder], start: Sequence[Path] = ()) -> None:
        """`start`: configurations of learners that run as long as this does."""
        self._start = start
        self._learners: list[asyncio.subprocess.Process] = []
        self._recorders = {each.policy: each for each in recorders}
        self._assignments: dict[str, Assignment] = {}
        self._writing = asyncio.Lock()
        self._keys: dict[str, KeyFile] = {}

    async def open(self, core: Core) -> None:
        """Raises ConfigurationError: a learner's folder cannot be used, or the proxy has several
        processes, which would not agree on assignments."""
        self.core = core
        if core.config.workers > 1:
            raise ConfigurationError(
                f"workers={core.config.workers}: a recorder with learners has one process; set it"
                " to 1"
            )
        for name, recorder in self._recorders.items():
            try:
                make_folder(recorder.folder)
                kept_key(recorder.key_file)
                self._assignments[name] = Assignment.read(recorder.assignment_file)
            except OSError as error:
                raise ConfigurationError(
                    f"recorder.folder={recorder.folder}: cannot be used ({error.strerror})"
                ) from error
            self._keys[name] = KeyFile(recorder.key_file)
        for file in self._start:
            self._learners.append(await _started(file))

    def state(self) -> Mapping[str, Any]:
        """Asked once per second and reader of the page."""
        return {"learners": [self._learner(each) for each in self._recorders.values()]}

    async def close(self) -> None:
        for learner in self._learners:
            with contextlib.suppress(ProcessLookupError):
                learner.terminate()
        for learner in self._learners:
            await learner.wait()

    async def serve(self, route: Route, request: web.Request) -> web.StreamResponse:
        if route.who is not Who.LEARNER:
            return await super().serve(route, request)
        try:
            self._check_key(request)
            return await route.handler(self, request)
        except ProxyError as error:
            return refused(error)

    async def policies_of(self, metadata: Mapping[str, Any]) -> Mapping[str, str]:
        recorder = self._of(metadata)
        if recorder is None:
            return {}
        number, after = self._assignments[recorder.policy].next()
        await self._set(recorder, after)
        return {"": policy_name(recorder.policy, number)} if number else {}

    @route("GET", _OF + "/sessions", name="learn_sessions", summary="Ended sessions", **_HIDDEN)
    async def _sessions(self, request: web.Request) -> web.Response:
        found = [session_view(each) async for each in self._readable(self._recorder(request))]
        return json_answer({"sessions": found})

    @route("GET", _OF + "/record", name="learn_record", summary="One session", **_HIDDEN)
    async def _record(self, request: web.Request) -> web.Response:
        session = await self._session(request)
        turns = await self.core.store.get_turns(session.session_id)
        return web.Response(body=encode_record(session, turns), content_type=CONTENT_TYPE)

    @route(
        "GET",
        _OF + "/images/{sha256:[0-9a-f]+}",
        name="learn_image",
        summary="An image of one session",
        **_HIDDEN,
    )
    async def _image(self, request: web.Request) -> web.Response:
        session, sha256 = await self._session(request), request.match_info["sha256"]
        turns = await self.core.store.get_turns(session.session_id)
        named = any(image.sha256 == sha256 for turn in turns for image in turn.images)
        image = await self.core.store.get_image(sha256) if named else None
        if image is None:
            raise SessionError(f"no turn of the session has the image {sha256}", status=404)
        return web.Response(body=image.data, content_type=CONTENT_TYPE)

    @route("PUT", _OF + "/decision", name="learn_decision", summary="Why a session", **_HIDDEN)
    async def _decision(self, request: web.Request) -> web.Response:
        session = await self._session(request)
        said = parsed(Decision, await read_body(request))
        await curation.keep(self.core.store, session.session_id, tags={LEARNED: said.text})
        return json_answer({})

    @route("GET", _OF + "/assignment", name="learn_state", summary="Adapters", **_HIDDEN)
    async def _state(self, request: web.Request) -> web.Response:
        return json_answer(await self._shown(self._recorder(request)))

    @route("PUT", _OF + "/assignment", name="learn_assign", summary="Adapters", **_HIDDEN)
    async def _assign(self, request: web.Request) -> web.Response:
        recorder = self._recorder(request)
        new = parsed(NewAssignment, await read_body(request))
        published = {each.name for each in self.core.router.policies.published}
        for number in filter(None, (new.stable, new.canary)):
            if policy_name(recorder.policy, number) not in published:
                raise RequestError(f"adapter {number} is not published", status=409)
        before = self._assignments[recorder.policy]
        is_over = new.done == before.order or new.canary != before.canary
        order = "" if is_over else before.order
        given = {"stable": new.stable, "canary": new.canary, "share": new.share, "order": order}
        await self._set(recorder, before.changed(time.time(), **given).told(new.told))
        return json_answer(await self._shown(recorder))

    @route("PUT", _OF + r"/adapters/{number:\d+}", name="learn_adapter", summary="", **_HIDDEN)
    async def _publish(self, request: web.Request) -> web.Response:
        """Publishes an adapter, once: a number never gets another one."""
        recorder, number = self._recorder(request), int(request.match_info["number"])
        new = parsed(NewAdapter, await read_body(request))
        name = policy_name(recorder.policy, number)
        known = self.core.router.policies.current(name)
        if known is not None and known.adapter != new.adapter:
            raise RequestError(f"{name} is {known.adapter} already", status=409)
        served = ServedPolicy(name, number, new.adapter)
        await self.core.store.publish_policy(served)
        await self.core.router.publish(served)
        return json_answer({})

    @route(
        "PUT",
        _OF + "/order",
        name="learn_order",
        summary="Promotes a canary, rolls it back, or freezes the policy",
        own=True,
        takes=Order,
        refusals=(400, 404, 409),
    )
    async def _order(self, request: web.Request) -> web.Response:
        recorder = self._recorder(request)
        wanted = parsed(Order, await read_body(request)).order
        before = self._assignments[recorder.policy]
        if wanted in ("promote", "rollback") and before.canary is None:
            raise RequestError(f"policy {recorder.policy}: there is no canary", status=409)
        if wanted in ("promote", "thaw") and len(before.switches) >= MAX_SWITCHES:
            raise RequestError(
                f"policy {recorder.policy}: its learner has not read the last {MAX_SWITCHES}"
                " orders; start it (freeze and rollback are taken)",
                status=409,
            )
        person = request.get(SCOPE, EVERYTHING).person or "administrator"
        await self._set(recorder, before.switched(wanted, time.time(), person))
        return json_answer(await self._shown(recorder))

    @route(
        "GET",
        _OF + "/state",
        name="learn_show",
        summary="Adapters of a policy",
        own=True,
        refusals=(404,),
    )
    async def _show(self, request: web.Request) -> web.Response:
        return json_answer(await self._shown(self._recorder(request)))

    def _recorder(self, request: web.Request) -> Recorder:
        name = request.match_info["policy"]
        found, scope = self._recorders.get(name), request.get(SCOPE, EVERYTHING)
        if found is None or (scope.person and found.only.get(PERSON) != scope.person):
            raise RequestError(f"policy {name!r}: no learner has it", status=404, param="policy")
        return found

    def _check_key(self, request: web.Request) -> None:
        keys = self._keys.get(request.match_info["policy"])
        if keys is None or not keys.accepts(api_key(request.headers) or ""):
            raise SessionError("this needs the key of the policy's learner", status=401)

    def _of(self, metadata: Mapping[str, Any]) -> Recorder | None:
        """The learner of a session with this metadata."""
        return next(
            (
                each
                for each in self._recorders.values()
                if has_consented(metadata, each.folders, each.only)
            ),
            None,
        )

    async def _readable(self, recorder: Recorder) -> AsyncIterator[Session]:
        for status in (SessionStatus.COMPLETED, SessionStatus.EXPIRED):
            where = SessionFilter(status=status, kind=SessionKind.TRAIN, limit=PAGE)
            while page := await self.core.store.list_sessions(where):
                for session in page:
                    if self._of(session.metadata) is recorder:
                        yield session
                where = replace(where, after=page[-1].session_id)

    async def _session(self, request: web.Request) -> Session:
        """Raises SessionError (404): there is no such session that the learner may read."""
        named, recorder = request.query.get("session", ""), self._recorder(request)
        session = await self.core.store.get_session(named)
        if session is None or self._of(session.metadata) is not recorder:
            raise SessionError(f"session {named!r} is not one that opted in", status=404)
        return session

    def _learner(self, recorder: Recorder) -> dict[str, Any]:
        """As `proxy.extras.view.answers.LearnerJson`."""
        shown = asdict(self._assignments[recorder.policy])
        try:
            written = recorder.journal_file.stat()
        except FileNotFoundError:
            written = None
        return {
            "policy": recorder.policy,
            "person": recorder.only.get(PERSON, ""),
            "folder": str(recorder.folder.absolute()),
            "running": is_locked(recorder.folder / LOCK),
            **{name: shown[name] for name in ("stable", "canary", "share", "frozen", "order")},
            "journal": [written.st_ino, written.st_size] if written else [0, 0],
            "journal_at": written.st_mtime if written else None,
        }

    async def _set(self, recorder: Recorder, after: Assignment) -> None:
        """Writes it before anything is served by it: this one, or one that came after it."""
        self._assignments[recorder.policy] = after
        async with self._writing:
            newest = self._assignments[recorder.policy]
            await asyncio.to_thread(newest.write, recorder.assignment_file)

    async def _shown(self, recorder: Recorder) -> dict[str, Any]:
        """The assignment; and of each adapter, how many open sessions have it."""
        counts: Counter[str] = Counter()
        where = SessionFilter(status=SessionStatus.OPEN, limit=PAGE)
        while page := await self.core.store.list_sessions(where):
            counts.update(session.policy_of("") for session in page)
            where = replace(where, after=page[-1].session_id)
        own = {name: n for name, n in counts.items() if name.startswith(f"{recorder.policy}-")}
        return {**asdict(self._assignments[recorder.policy]), "open": own}


async def _started(file: Path) -> asyncio.subprocess.Process:
    """A learner with this configuration, which ends with this process, however that ends."""
    command = [sys.executable, "-c", _TRAIN, "learn", "--config", str(file)]
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), str(STOP_GRACE_S)),
        *command,
        stdin=asyncio.subprocess.PIPE,
        start_new_session=True,
    )


Learning.routes = routes_of(Learning)


class LearnSection(ExtraConfig):
    """The settings of the extra. Several learners may share a recorder: a session belongs to the
    first whose conditions it fulfils."""

    recorders: tuple[Recorder, ...] = Field(min_length=1)
    start: tuple[Path, ...] = ()
    """Configurations of learners that run as long as the recorder, each in a process of its own."""

    def build(self) -> Extra:
        names = [each.policy for each in self.recorders]
        if len(set(names)) < len(names):
            raise ConfigurationError(f"recorder.policy: {', '.join(names)}: names must differ")
        return Learning(self.recorders, self.start)


def policy_name(policy: str, number: int) -> str:
    """The policy of an adapter. Example: policy_name("work", 7) → "work-7" """
    return f"{policy}-{number}"
