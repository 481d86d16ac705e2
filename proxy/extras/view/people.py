"""What people say in sessions, and of them: the user's first words, and ratings.

Invariant: the requests of a session are read until its first words are known, and then never again
while it is one of the LATEST that were shown.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from proxy.conversation.first_words import words_and_certainty
from proxy.extras.view.answers import SessionJson
from proxy.extras.view.masking import secrets_seen
from proxy.extras.view.summaries import summary_json
from proxy.records import REFUSED
from proxy.store.browser import Browser, SessionSummary
from proxy.store.curation import RATING

LATEST = 10_000
"""Sessions whose first words stay in memory: 2 MB."""
READ_TURNS = (1, 8)
"""Turns that are read: the first, and if it may not have the user's words (an agent may ask for a
title first), those up to the eighth."""


class People:
    """Sessions as the page shows them."""

    def __init__(self) -> None:
        self._asked: OrderedDict[tuple[str, float, int, int], str] = OrderedDict()
        """By session, and by its number of turns while more of them could change the words."""

    async def of(self, browser: Browser, found: Sequence[SessionSummary]) -> list[SessionJson]:
        ids = [each.session.session_id for each in found]
        said = await browser.last_events(ids, RATING)
        refused = await browser.last_events(ids, REFUSED)
        return [
            summary_json(each, await self._words(browser, each), said.get(name), refused.get(name))
            for name, each in zip(ids, found, strict=True)
        ]

    async def _words(self, browser: Browser, summary: SessionSummary) -> str:
        session = summary.session
        seen = await secrets_seen(browser, session.session_id)
        turns = summary.turns + session.recorded_turns
        known = (session.session_id, session.created_at, seen)
        for key in ((*known, READ_TURNS[-1]), (*known, min(turns, READ_TURNS[-1]))):
            if key in self._asked:
                self._asked.move_to_end(key)
                return self._asked[key]
        words, certain, requests = "", False, list[bytes]()
        for until in READ_TURNS:
            if certain or len(requests) >= turns:
                break
            requests += await browser.requests(session.session_id, len(requests), until)
            words, certain = await asyncio.to_thread(words_and_certainty, requests)
        last = READ_TURNS[-1] if certain else min(turns, READ_TURNS[-1])
        self._asked[(*known, last)] = words
        while len(self._asked) > LATEST:
            self._asked.popitem(last=False)
        return words
