"""How far a branch has replayed its recorded turns, as JSON."""

from __future__ import annotations

from typing import Any

from proxy.branching.divergence import RequestDifference
from proxy.records import Session
from proxy.store.protocol import Store

_NOT_OF_THE_DIFFERENCE = {"seq", "at", "kind", "mode"}


async def replay_view(store: Store, session: Session) -> dict[str, Any] | None:
    """None for a session that is not a branch."""
    if session.origin is None:
        return None
    replayed = (await store.undelivered(session.session_id)).replayed
    events = await store.get_events(session.session_id)
    found = [e for e in events if e["kind"] == "diverged"]
    differences = [
        RequestDifference(**{k: v for k, v in event.items() if k not in _NOT_OF_THE_DIFFERENCE})
        for event in found
    ]
    return {"turns": sorted(replayed), "diverged": [each.text for each in differences]}
