"""The page's requests by which a person rates, tags, deletes and exports a session.

Invariant: only sessions of the page's store are changed, by the administrator, by a reader whom
`agentic-proxy view --edit` let in, or by the person whose session it is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from urllib.parse import quote

from aiohttp import web

from proxy.control.schema import Curation, parsed
from proxy.errors import RequestError, SessionError
from proxy.extras.export.images import as_json
from proxy.extras.export.protocol import ImagesFound
from proxy.extras.export.registry import FORMATS, open_format
from proxy.extras.export.rows import Rows
from proxy.extras.export.selection import ExportSelection, Filters
from proxy.extras.view.json_answer import HEADERS, answer
from proxy.extras.view.parameters import TEXT
from proxy.extras.view.query import session_id
from proxy.http.openapi import Nothing
from proxy.http.route import Who, route
from proxy.http.server import read_body
from proxy.http.valid_json import write_json
from proxy.person_keys import SCOPE
from proxy.records import Session, SessionKind
from proxy.rendering.tokenizer import Tokenizer
from proxy.store.curation import keep, removable
from proxy.store.protocol import SessionFilter, Store

LINES = "application/x-ndjson"
_SESSION = {"session": TEXT}


class CurationRequests:
    """The handlers of what changes a session, and of its download."""

    def __init__(
        self,
        store: Callable[[], Store],
        delete: Callable[[str], Awaitable[object]],
        tokenizer: Callable[[], Tokenizer | None] = lambda: None,
        *,
        hides: bool = True,
    ) -> None:
        """`delete` removes a session. `hides`: a download has no secrets."""
        self._store = store
        self._delete = delete
        self._tokenizer = tokenizer
        self._hides = hides

    @route(
        "POST",
        "/view/session/curation",
        name="session_curate",
        who=Who.ADMIN,
        own=True,
        summary="Keeps a person's rating, which may change, and tags",
        answer=Nothing,
        takes=Curation,
        query=_SESSION,
        needs=("session",),
        refusals=(400, 403, 404, 503),
    )
    async def _curate(self, request: web.Request) -> web.Response:
        said = parsed(Curation, await read_body(request))
        request[SCOPE].check_tags(said.tags)
        try:
            await keep(self._store(), session_id(request), **dict(said))
        except ValueError as error:
            raise RequestError(str(error)) from None
        return answer({})

    @route(
        "DELETE",
        "/view/session",
        name="session_delete",
        who=Who.ADMIN,
        own=True,
        summary="Removes a session and its record",
        answer=Nothing,
        query=_SESSION,
        needs=("session",),
        refusals=(403, 404, 409, 503),
    )
    async def _remove(self, request: web.Request) -> web.Response:
        session = await removable(self._store(), session_id(request))
        await self._delete(session.session_id)
        return answer({})

    @route(
        "GET",
        "/view/session/export",
        name="session_export",
        who=Who.READER,
        own=True,
        summary="A session as training data, in a format of `agentic-proxy export`",
        query={**_SESSION, "format": {"enum": list(FORMATS)}},
        needs=("session", "format"),
        other_types=(LINES,),
        refusals=(400, 404, 409, 503),
    )
    async def _export(self, request: web.Request) -> web.Response:
        """As JSON lines."""
        name = request.query.get("format", "")
        if name not in FORMATS:
            raise RequestError(f"format: {name[:40]!r} is not one of {', '.join(FORMATS)}")
        form = open_format(name)
        session = await self._named(request)
        where = SessionFilter(kind=SessionKind(session.kind), id_prefix=session.session_id, limit=1)
        selection = ExportSelection(self._store(), Filters(where, ids=(session.session_id,)), form)
        tokenizer = self._tokenizer()
        decode = None if tokenizer is None else tokenizer.decode
        found = Rows(selection, form, self._store(), decode=decode, hides=self._hides)
        try:
            rows = [row async for row in found]
        except ImagesFound:
            rows = [row async for row in found]
        if not rows:
            why = ", ".join(selection.left_out) or "a session with nothing to export"
            raise SessionError(f"format {name} leaves out {why}", status=409)
        file = quote(f"{session.session_id.replace('/', '-')}.{name}.jsonl", safe="")
        told = {**HEADERS, "Content-Disposition": f"attachment; filename*=UTF-8''{file}"}
        body = b"".join(write_json(row, default=as_json) + b"\n" for row in rows)
        return web.Response(body=body, content_type=LINES, headers=told)

    async def _named(self, request: web.Request) -> Session:
        named = session_id(request)
        session = await self._store().get_session(named)
        if session is None:
            raise SessionError(f"session {named!r} does not exist", status=404)
        return session
