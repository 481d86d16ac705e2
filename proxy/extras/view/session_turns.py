"""The turns of one session, read from the store when they are needed, and what they belong to."""

from __future__ import annotations

import orjson

from proxy.errors import SessionError
from proxy.records import Turn
from proxy.store.browser import Browser

BATCH = 64
"""Turns read at a time: those before a turn are most likely the next ones on its path."""


class SessionTurns(dict[int, Turn]):
    """Turns by index. `read` adds those that are missing."""

    def __init__(self, browser: Browser, session_id: str) -> None:
        super().__init__()
        self._browser = browser
        self._session_id = session_id

    async def read(self, index: int) -> Turn:
        """Raises SessionError (404) if the session has no such turn."""
        if index not in self:
            wanted = range(max(0, index - BATCH + 1), index + 1)
            missing = [each for each in wanted if each not in self]
            for turn in await self._browser.turns(self._session_id, missing):
                self[turn.index] = turn
        if index not in self:
            raise SessionError(f"session {self._session_id!r} has no turn {index}", status=404)
        return self[index]

    async def path(self, index: int) -> list[Turn]:
        """The turns whose tokens are on the turn's path, from the root."""
        chain = [await self.read(index)]
        while (parent := chain[-1].parent) is not None:
            chain.append(await self.read(parent))
        return chain[::-1]

    async def conversation(self, index: int) -> list[Turn]:
        """The turns whose messages make up the conversation that the turn answers, the first one
        first; the turn itself is the last one."""
        chain = [await self.read(index)]
        while chain[-1].request:
            fields = orjson.loads(chain[-1].request)
            before: int | None = fields.get("same_as", fields.get("after"))
            if before is None:
                break
            chain.append(await self.read(before))
        return chain[::-1]
