"""How far a branch has replayed its recorded turns, as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from proxy.branching.divergence import RequestDifference
from proxy.records import Session, Turn
from proxy.store.protocol import Store

_NOT_OF_THE_DIFFERENCE = {"seq", "at", "kind", "mode"}


async def replay_view(
    store: Store, session: Session, turns: Sequence[Turn]
) -> dict[str, Any] | None:
    """`turns` are the session's. None for a session that is not a branch."""
    if session.origin is None:
        return None
    marked = (await store.undelivered(session.session_id)).replayed
    arrived = _arrived(turns, {*marked, *range(session.origin.turn, len(turns))})
    replayed = [index for index in sorted(arrived) if index < session.origin.turn]
    events = await store.get_events(session.session_id)
    found = [e for e in events if e["kind"] == "diverged"]
    differences = [
        RequestDifference(**{k: v for k, v in event.items() if k not in _NOT_OF_THE_DIFFERENCE})
        for event in found
    ]
    return {"turns": replayed, "diverged": [each.text for each in differences]}


def _arrived(turns: Sequence[Turn], reached: Iterable[int]) -> set[int]:
    """The turns that the agent has reached, and all whose answers these continue: a process that is
    killed loses the latest marks of answers that arrived."""
    found, walked = set(reached), set[int]()
    # The turn that shares most comes first: what it has passed need not be walked again, because
    # any other turn shares less and would find nothing more.
    for index in sorted(found, key=lambda index: -turns[index].shared_tokens):
        at = turns[index].parent
        while at is not None and at not in walked:
            walked.add(at)
            if turns[at].path_tokens <= turns[index].shared_tokens:
                found.add(at)
            at = turns[at].parent
    return found
