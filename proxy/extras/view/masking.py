"""Shows sessions without their secrets: what reads the store for the page, with masked texts.

Invariant: everything that a session has said is read before any part of it is shown, so that a
secret that one turn shows is masked in all of them. The record stays as it is.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, TypeVar, cast

from proxy.errors import StoreError
from proxy.extras.secrets import SessionSecrets
from proxy.extras.secrets.found import Found, within
from proxy.records import Mark, Turn, TurnStatus
from proxy.rendering.tokenizer import Tokenizer
from proxy.store.browser import Browser, Recent, SessionPage, SessionSummary, WrittenTurn

LATEST = 256
"""Sessions whose secrets stay in memory, with their token ids (0.5 MB for 112k tokens), and turns
that stay in memory without secrets."""
TURNS = 64
"""Turns that are read at a time."""
TEXTS, LEAST_CHARS = 1_000, 1_000
"""Texts whose secrets stay in memory, and from how many characters on: the system prompts and tools
that all sessions of an agent have."""
T = TypeVar("T")


class Masking:
    """The secrets of the sessions that were shown last."""

    def __init__(self, *, hides: bool = True) -> None:
        """`hides`: False shows everything as it is recorded."""
        self._hides = hides
        self._sessions: OrderedDict[tuple[str, str], _Read] = OrderedDict()
        self._texts: OrderedDict[bytes, Found] = OrderedDict()
        self._turns: OrderedDict[tuple[str, str, float | None, int, int], Turn] = OrderedDict()

    def of(self, browser: Browser, tokenizer: Tokenizer | None, run: str = "") -> Browser:
        """Reads the store of a run as `browser` does, without secrets. `run` is empty for the
        page's own store."""
        if not self._hides or isinstance(cast("object", browser), _MaskedBrowser):
            return browser
        return cast("Browser", _MaskedBrowser(browser, self, tokenizer, run))

    async def read(
        self, browser: Browser, tokenizer: Tokenizer | None, run: str, session_id: str
    ) -> SessionSecrets:
        """The secrets of a session, with those of the turns that were added since."""
        key = (run, session_id)
        decode = None if tokenizer is None else tokenizer.decode
        created_at = await browser.created_at(session_id)
        found = self._sessions.get(key)
        if found is None or (found.tokenizer, found.created_at) != (tokenizer, created_at):
            found = _Read(SessionSecrets(decode, self._within), tokenizer, created_at)
            self._sessions[key] = found
        self._sessions.move_to_end(key)
        while len(self._sessions) > LATEST:
            self._sessions.popitem(last=False)
        async with found.lock:
            await found.go_on(browser, session_id)
        return found.secrets

    def masked(
        self, key: tuple[str, str, float | None, int], secrets: SessionSecrets, turn: Turn
    ) -> Turn:
        """The turn of a session without secrets. `key`: the session, and how many it has."""
        place = (*key, turn.index)
        found = self._turns.pop(place, None)
        if found is None or found.status is not turn.status:
            found = secrets.masked(turn)
        self._turns[place] = found
        with suppress(KeyError):  # of another thread
            while len(self._turns) > LATEST:
                self._turns.popitem(last=False)
        return found

    async def pieces(self, browser: Browser | None, session_id: str, value: T) -> T:
        """Pieces of text from the files of a trial, such as its log: the strings of JSON, without
        the secrets of its session. `browser`: of `of`; None if the session is not recorded."""
        if not self._hides:
            return value
        secrets = SessionSecrets(None, self._within)
        if isinstance(cast("object", browser), _MaskedBrowser):
            with suppress(StoreError):  # the files are shown without the store, too
                secrets = await cast("Any", browser).secrets(session_id)
        return cast("T", await asyncio.to_thread(_mask_pieces, secrets, value))

    def words(self, value: T) -> T:
        """Texts that belong to no session, or to one that need not be read: the strings of JSON,
        without the secrets that these texts show."""
        if not self._hides:
            return value
        return cast("T", _mask_pieces(SessionSecrets(None, self._within), value))

    def _within(self, text: str) -> Found:
        if len(text) < LEAST_CHARS:
            return within(text)
        key = blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()
        found = self._texts.get(key)
        if found is None:
            found = self._texts[key] = within(text)
            if len(self._texts) > TEXTS:
                self._texts.popitem(last=False)
        return found


@dataclass(slots=True)
class _Read:
    """How far a session was read."""

    secrets: SessionSecrets
    tokenizer: Tokenizer | None
    created_at: float | None
    """Another session may get the id of one that was deleted."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _next: int = 0
    _open: set[int] = field(default_factory=set)
    """Turns without an answer, which are read again."""

    async def go_on(self, browser: Browser, session_id: str) -> None:
        name: str | None = session_id if self._next == 0 else None
        while name is not None and (summary := await browser.session(name)) is not None:
            self.secrets.add_session(summary.session)  # a branch has texts of its origin
            name = None if summary.session.origin is None else summary.session.origin.session_id
        while True:
            wanted = [*sorted(self._open), *range(self._next, self._next + TURNS)]
            turns = await browser.turns(session_id, wanted)
            new = [turn for turn in turns if turn.index >= self._next or turn.answer]
            if new:
                await asyncio.to_thread(self.secrets.add, new)
            self._open -= {turn.index for turn in turns if turn.status is not TurnStatus.OPEN}
            later = [turn for turn in turns if turn.index >= self._next]
            self._open |= {turn.index for turn in later if turn.status is TurnStatus.OPEN}
            self._next = max([self._next, *(turn.index + 1 for turn in later)])
            if len(later) < TURNS:
                return


class _MaskedBrowser:
    """A `Browser`: what is not defined here is the one that is given."""

    def __init__(
        self, browser: Browser, masking: Masking, tokenizer: Tokenizer | None, run: str
    ) -> None:
        self.browser = browser
        self._masking = masking
        self._tokenizer = tokenizer
        self._run = run

    def __getattr__(self, name: str) -> Any:
        return getattr(self.browser, name)

    async def secrets(self, session_id: str) -> SessionSecrets:
        return await self._masking.read(self.browser, self._tokenizer, self._run, session_id)

    async def sessions(self, page: SessionPage) -> list[SessionSummary]:
        return [await self._summary(each) for each in await self.browser.sessions(page)]

    async def session(self, session_id: str) -> SessionSummary | None:
        found = await self.browser.session(session_id)
        return None if found is None else await self._summary(found)

    async def _summary(self, summary: SessionSummary) -> SessionSummary:
        secrets = await self.secrets(summary.session.session_id)
        secrets.add_session(summary.session)  # tags may be new
        return replace(summary, session=secrets.masked_session(summary.session))

    async def marks(self, session_ids: Sequence[str]) -> dict[str, list[Mark]]:
        found = await self.browser.marks(session_ids)
        return {
            session_id: (await self.secrets(session_id)).mask_marks(marks)
            for session_id, marks in found.items()
        }

    async def turns(self, session_id: str, indexes: Sequence[int]) -> list[Turn]:
        secrets = await self.secrets(session_id)
        found = await self.browser.turns(session_id, indexes)
        created_at = await self.browser.created_at(session_id)
        key = (self._run, session_id, created_at, len(secrets.known))
        return await asyncio.to_thread(
            lambda: [self._masking.masked(key, secrets, turn) for turn in found]
        )

    async def requests(self, session_id: str, first: int, until: int) -> list[bytes]:
        secrets = await self.secrets(session_id)
        found = await self.browser.requests(session_id, first, until)
        return await asyncio.to_thread(lambda: [secrets.mask_json(each) for each in found])

    async def last_events(self, session_ids: Sequence[str], kind: str) -> dict[str, dict[str, Any]]:
        found = await self.browser.last_events(session_ids, kind)
        return {
            session_id: (await self.secrets(session_id)).mask_value(data)
            for session_id, data in found.items()
        }

    async def written(self, before: int, limit: int, max_bytes: int) -> list[WrittenTurn]:
        masked: list[WrittenTurn] = []
        for turn in await self.browser.written(before, limit, max_bytes):
            secrets = await self.secrets(turn.session_id)
            request = await asyncio.to_thread(secrets.mask_json, turn.request)
            answer = await asyncio.to_thread(secrets.mask_json, turn.answer)
            masked.append(replace(turn, request=request, answer=answer))
        return masked

    async def recent(self, after: Any, limit: int) -> Recent:
        found = await self.browser.recent(after, limit)
        events: list[dict[str, Any]] = []
        for event in found.events:
            secrets = await self.secrets(str(event["session_id"]))
            named = {key: event[key] for key in ("session_id", "kind")}
            events.append({**secrets.mask_value(event), **named})
        return replace(found, events=events)


def unmasked(browser: Browser) -> Browser:
    """For readers that show none of its texts."""
    masked = cast("object", browser)
    return masked.browser if isinstance(masked, _MaskedBrowser) else browser


async def secrets_seen(browser: Browser, session_id: str) -> int:
    """Number of secrets that are known of a session; what was shown before they were is made
    again. 0 for a browser that masks nothing."""
    if not isinstance(cast("object", browser), _MaskedBrowser):
        return 0
    return len((await cast("Any", browser).secrets(session_id)).known)


def _mask_pieces(secrets: SessionSecrets, value: Any) -> Any:
    """The value of JSON whose strings are pieces of longer texts."""
    if isinstance(value, str):
        return secrets.known.mask_piece(value)
    if isinstance(value, list | tuple):
        return [_mask_pieces(secrets, each) for each in value]
    if isinstance(value, Mapping):
        return {name: _mask_pieces(secrets, each) for name, each in value.items()}
    return value
