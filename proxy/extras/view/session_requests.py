"""The requests of the page for one session, in the page's store or in that of another run.

The parameter `run` names a run; without it, the session is in the page's store.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from proxy.conversation.images import uncut
from proxy.errors import RequestError, SessionError
from proxy.extras.view.answers import (
    ForkJson,
    HeadsPage,
    SessionJson,
    TextPiece,
    TokensPage,
    TurnsAnswer,
)
from proxy.extras.view.bounded import PIECE_CHARS, text_of, turn_json
from proxy.extras.view.fork import fork_json
from proxy.extras.view.json_answer import ALONE, HEADERS, answer
from proxy.extras.view.masking import Masking, secrets_seen
from proxy.extras.view.parameters import COUNT, SESSION, TEXT, TURN, up_to
from proxy.extras.view.people import People
from proxy.extras.view.query import count, session_id, turn_index, turn_indexes
from proxy.extras.view.runs import RecordedRuns
from proxy.extras.view.session_turns import SessionTurns
from proxy.extras.view.summaries import head_json
from proxy.extras.view.turn_tokens import TurnTokens, turn_tokens
from proxy.http.route import Who, route
from proxy.records import TurnStatus
from proxy.rendering.tokenizer import Tokenizer
from proxy.store.browser import Browser
from proxy.wire.images import MEDIA_TYPES

HEADS = 500
"""Turns of a session in one answer."""
CONVERSATION_TURNS = 20
CACHED_PATHS = 4
"""Paths whose tokens stay in memory while a reader scrolls: 1 MB each for 128k tokens, and as much
again for each recorded alternative of a sampled token."""


class SessionRequests:
    """The handlers of one session's turns."""

    def __init__(
        self,
        browser: Callable[[], Browser],
        runs: RecordedRuns,
        tokenizer: Callable[[], Tokenizer | None],
        people: People,
        masking: Masking,
    ) -> None:
        self._browser = browser
        self._runs = runs
        self._tokenizer = tokenizer
        self._people = people
        self._masking = masking
        self._paths: OrderedDict[tuple[str, str, float | None, int, int], TurnTokens] = (
            OrderedDict()
        )

    @route(
        "GET",
        "/view/session",
        who=Who.READER,
        own=True,
        summary="One session",
        answer=SessionJson,
        query=SESSION,
        needs=("session",),
        refusals=(404, 503),
    )
    async def _session(self, request: web.Request) -> web.Response:
        named = session_id(request)
        async with self._store(request) as browser:
            found = await browser.session(named)
            if found is None:
                raise SessionError(f"session {named!r} does not exist", status=404)
            (shown,) = await self._people.of(browser, [found])
        return answer(shown)

    @route(
        "GET",
        "/view/heads",
        who=Who.READER,
        own=True,
        summary="The turns of a session without tokens and texts",
        answer=HeadsPage,
        query={**SESSION, "since": COUNT},
        needs=("session",),
        refusals=(400, 503),
    )
    async def _heads(self, request: web.Request) -> web.Response:
        since = count(request, "since", 0, most=2**31 - 1, least=0)
        async with self._store(request) as browser:
            found = await browser.heads(session_id(request), since, HEADS)
        more = found[-1].index + 1 if len(found) == HEADS else None
        return answer(HeadsPage(turns=[head_json(head) for head in found], next=more))

    @route(
        "GET",
        "/view/turns",
        who=Who.READER,
        own=True,
        summary="The messages of turns",
        answer=TurnsAnswer,
        query={**SESSION, "turns": {"type": "string", "pattern": r"^\d+(,\d+)*$"}},
        needs=("session", "turns"),
        refusals=(400, 503),
    )
    async def _turns(self, request: web.Request) -> web.Response:
        """The messages of up to CONVERSATION_TURNS turns."""
        indexes = turn_indexes(request, CONVERSATION_TURNS)
        async with self._store(request) as browser:
            found = await browser.turns(session_id(request), indexes)
        return answer(TurnsAnswer(turns=[turn_json(turn) for turn in found]))

    @route(
        "GET",
        "/view/text",
        who=Who.READER,
        own=True,
        summary="A piece of a long text, which begins at the character `from`",
        answer=TextPiece,
        query={**TURN, "place": TEXT, "from": COUNT},
        needs=("session", "turn", "place"),
        refusals=(400, 404, 503),
    )
    async def _text(self, request: web.Request) -> web.Response:
        """A piece of a long text, from the character `from` on."""
        async with self._turns_of(request) as turns:
            turn = await turns.read(turn_index(request))
        text = text_of(turn, request.query.get("place", ""))
        if text is None:
            raise RequestError("place: the turn has no such text", status=404)
        start = count(request, "from", 0, most=2**40, least=0)
        shown = text[start : uncut(text, start + PIECE_CHARS)]
        piece: TextPiece = {"text": shown, "from": start, "chars": len(text)}
        return answer(piece)

    @route(
        "GET",
        "/view/image",
        who=Who.READER,
        own=True,
        summary="An image of a session, as the agent sent it",
        query={**SESSION, "sha256": {"type": "string", "pattern": "^[0-9a-f]{64}$"}},
        needs=("session", "sha256"),
        other_types=MEDIA_TYPES,
        refusals=(400, 404, 503),
    )
    async def _image(self, request: web.Request) -> web.Response:
        named, sha256 = session_id(request), request.query.get("sha256", "")
        async with self._store(request) as browser:
            image = await browser.image(named, sha256)
        if image is None or image.media_type not in MEDIA_TYPES:
            raise SessionError(f"session {named!r} has no image {sha256[:64]!r}", status=404)
        return web.Response(body=image.data, content_type=image.media_type, headers=HEADERS | ALONE)

    @route(
        "GET",
        "/view/fork",
        who=Who.READER,
        own=True,
        summary="Why a turn forks: what was sent against what was recorded",
        answer=ForkJson,
        query=TURN,
        needs=("session", "turn"),
        refusals=(400, 404, 503),
    )
    async def _fork(self, request: web.Request) -> web.Response:
        async with self._turns_of(request) as turns:
            return answer(await fork_json(turns, turn_index(request), self._tokenizer_of(request)))

    @route(
        "GET",
        "/view/tokens",
        who=Who.READER,
        own=True,
        summary="The tokens of a turn's path: what the model saw and wrote",
        answer=TokensPage,
        query={**TURN, "start": COUNT, "count": up_to(4000)},
        needs=("session", "turn"),
        refusals=(400, 404, 503),
    )
    async def _tokens(self, request: web.Request) -> web.Response:
        start = count(request, "start", 0, most=2**31, least=0)
        wanted = count(request, "count", 1000, most=4000)
        tokens = await self._path(request)
        tokenizer = self._tokenizer_of(request)
        page = await asyncio.to_thread(tokens.page, start, wanted, tokenizer)
        end = start + len(page["ids"])
        recorded = await asyncio.to_thread(tokens.alternatives_page, start, end, tokenizer)
        if recorded is not None:
            page["alternatives"] = recorded
        session, run = session_id(request), request.query.get("run", "")
        trained = await asyncio.to_thread(self._runs.trained_tokens, session, run)
        if trained is not None:
            page["trained"] = trained.page(tokens.spans, start, end)
        return answer(page)

    def _tokenizer_of(self, request: web.Request) -> Tokenizer | None:
        """None if it is not known, or not that of the run."""
        name = request.query.get("run", "")
        fits = not name or self._runs.has_model_of_the_page(self._runs.named(name))
        return self._tokenizer() if fits else None

    async def _path(self, request: web.Request) -> TurnTokens:
        index, named = turn_index(request), session_id(request)
        async with self._store(request) as browser:
            seen = await secrets_seen(browser, named)
            created_at = await browser.created_at(named)
            key = (request.query.get("run", ""), named, created_at, index, seen)
            if key in self._paths:
                self._paths.move_to_end(key)
                return self._paths[key]
            path = await SessionTurns(browser, named).path(index)
        tokens = turn_tokens(path)
        if path[-1].status is not TurnStatus.OPEN:
            self._paths[key] = tokens
            while len(self._paths) > CACHED_PATHS:
                self._paths.popitem(last=False)
        return tokens

    @asynccontextmanager
    async def _turns_of(self, request: web.Request) -> AsyncIterator[SessionTurns]:
        async with self._store(request) as browser:
            yield SessionTurns(browser, session_id(request))

    @asynccontextmanager
    async def _store(self, request: web.Request) -> AsyncIterator[Browser]:
        """Raises SessionError (404) for a run that has no sessions, or is not shown."""
        name = request.query.get("run", "")
        if not name:
            yield self._browser()
            return
        async with self._runs.browser_of(self._runs.named(name), self._browser()) as browser:
            if browser is None:
                raise SessionError(f"the run {name[:80]!r} has no sessions of its own", status=404)
            yield self._masking.of(browser, self._tokenizer_of(request), name)
