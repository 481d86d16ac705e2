"""Searches the turns of a store, from the newest to the oldest.

Invariant: one call reads a bounded number of turns and bytes; the caller asks for older ones.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from proxy.person_keys import EVERYTHING, Scope
from proxy.search.terms import HitJson, SearchTerms
from proxy.store.browser import Browser

TURNS = 500
"""Turns that one call reads."""
READ_BYTES = 8 * 2**20
"""Texts that one call reads, unless one turn has more."""
LAST_PLACE = 2**62
"""After the newest turn."""


class Searched(NamedTuple):
    """The turns that match, the newest first."""

    hits: list[HitJson]
    read: int
    """Number of turns that were read."""
    older: int | None
    """`before` of the call that goes on; None: there are no older turns."""


async def search(
    browser: Browser, terms: SearchTerms, before: int = LAST_PLACE, scope: Scope = EVERYTHING
) -> Searched:
    """Reads the turns of these sessions that began before the place `before`.

    Raises:
        RequestError: an expression takes too long.
    """
    turns = await browser.written(before, TURNS, READ_BYTES)
    own = [turn for turn in turns if scope.has(turn.session_id)]
    hits = await asyncio.to_thread(terms.hits, own)
    older = turns[-1].place if turns and turns[-1].place > 1 else None
    return Searched(hits, len(own), older)
