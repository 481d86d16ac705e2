"""What people say in sessions, and of them: the user's first words, and ratings.

Invariant: the requests of a session are read until its first words are known, and then never again
while it is one of the LATEST that were shown.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from proxy.conversation.first_words import first_words
from proxy.extras.view.answers import SessionJson
from proxy.extras.view.masking import secrets_seen
from proxy.extras.view.summaries import summary_json
from proxy.store.browser import Browser, SessionSummary
from proxy.store.curation import RATING

LATEST = 10_000
"""Sessions whose first words stay in memory: 2 MB."""
READ_TURNS = (1, 8)
"""Turns that are read: the first, and if it has none of the user's words (an agent may ask for a
title first), those up to the eighth."""


class People:
    """Sessions as the page shows them."""

    def __init__(self) -> None:
        self._asked: OrderedDict[tuple[str, float, int], str] = OrderedDict()

    async def of(self, browser: Browser, found: Sequence[SessionSummary]) -> list[SessionJson]:
        said = await browser.last_events([each.session.session_id for each in found], RATING)
        return [
            summary_json(each, await self._words(browser, each), said.get(each.session.session_id))
            for each in found
        ]

    async def _words(self, browser: Browser, summary: SessionSummary) -> str:
        session = summary.session
        seen = await secrets_seen(browser, session.session_id)
        key = (session.session_id, session.created_at, seen)
        if key in self._asked:
            self._asked.move_to_end(key)
            return self._asked[key]
        words, read, turns = "", 0, summary.turns + session.recorded_turns
        for until in READ_TURNS:
            if words or read >= turns:
                break
            requests = await browser.requests(session.session_id, read, until)
            words, read = await asyncio.to_thread(first_words, requests), until
        if words or turns >= READ_TURNS[-1]:
            self._asked[key] = words
            while len(self._asked) > LATEST:
                self._asked.popitem(last=False)
        return words
