"""The extra `rules`: search rules are matched with each recorded turn, and mark its session.

It is always on, because rules can be saved from the page.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from proxy.errors import SessionError
from proxy.extra import Core, Extra
from proxy.extras.rules.watch import RuleWatch
from proxy.records import Mark, Turn


class SearchRules(Extra):
    """Hands recorded turns to a `RuleWatch`."""

    async def open(self, core: Core) -> None:
        async def act(session_id: str, mark: Mark) -> None:
            with suppress(SessionError):  # the session was deleted meanwhile
                await core.sessions.end_by(mark, session_id)

        self._watch = RuleWatch(core.store, core.config.rules or [], core.metrics, act)
        self._watch.start()

    def on_turn(self, session_id: str, turn: Turn, model: str) -> None:
        self._watch.recorded(session_id, turn)

    async def on_end(self, session_id: str) -> None:
        await self._watch.settled(session_id)

    def state(self) -> Mapping[str, Any]:
        return {"rule_faults": self._watch.faults}

    async def close(self) -> None:
        await self._watch.close()
