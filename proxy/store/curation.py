"""What a person says of a recorded session: a rating with a comment, tags, or that it may go.

Invariant: a rating is the session's reward `rating`, which is used as any other; a tag is an entry
of its metadata, by which `export --tag` selects. What was said stays in the session's events.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from proxy.errors import SessionError
from proxy.records import Reward, Session, TurnStatus
from proxy.store.protocol import Store

RATING = "rating"
"""Key of the reward that is a person's rating, and kind of the events with its comments."""
TAGGED = "tagged"
"""Kind of the events with changes of tags."""
THUMBS = {"up": 1.0, "down": 0.0}
MAX_COMMENT_CHARS = 4_000
MAX_NAME_CHARS = 80
MAX_VALUE_CHARS = 500
MAX_TAGS = 100


async def keep(
    store: Store,
    session_id: str,
    *,
    value: float | None = None,
    comment: str = "",
    tags: Mapping[str, str] | None = None,
) -> None:
    """Keeps what a person says of a session. `value`: the rating, in place of an earlier one; None
    leaves it. `comment`: why. `tags`: what changes; an empty text removes one.

    Raises:
        ValueError: the value is not finite, a text is too long, or there are too many tags.
        SessionError: there is no such session (404).
    """
    changes = dict(tags or {})
    _check(value, comment, changes)
    if await store.get_session(session_id) is None:
        raise _missing(session_id)
    await _tag(store, session_id, changes)
    if value is not None:
        await store.set_reward(session_id, Reward(RATING, value))
    if value is not None or comment:
        await store.add_event(session_id, RATING, {"value": value, "comment": comment})


async def removable(store: Store, session_id: str) -> Session:
    """The session, if it may be removed: an open one may, unless a call is being answered.

    Raises:
        SessionError: there is no such session (404), or one of its calls is being answered (409).
    """
    session = await store.get_session(session_id)
    if session is None:
        raise _missing(session_id)
    open_turns = (
        turn.index for turn in await store.get_turns(session_id) if turn.status is TurnStatus.OPEN
    )
    if (index := next(open_turns, None)) is not None:
        raise SessionError(
            f"session {session_id!r}: turn {index} is being answered; end its agent first",
            status=409,
        )
    return session


def _check(value: float | None, comment: str, changes: Mapping[str, str]) -> None:
    if value is not None and not math.isfinite(value):
        raise ValueError(f"value: {value} is not a finite number")
    if len(comment) > MAX_COMMENT_CHARS:
        raise ValueError(
            f"comment: has {len(comment)} characters; at most {MAX_COMMENT_CHARS} are kept"
        )
    for name, text in changes.items():
        if not 0 < len(name) <= MAX_NAME_CHARS:
            raise ValueError(
                f"tag {name[:MAX_NAME_CHARS]!r}: the name has {len(name)} characters; give 1 to"
                f" {MAX_NAME_CHARS}"
            )
        if len(text) > MAX_VALUE_CHARS:
            raise ValueError(
                f"tag {name!r}: the value has {len(text)} characters; at most {MAX_VALUE_CHARS}"
                " are kept"
            )


async def _tag(store: Store, session_id: str, changes: Mapping[str, str]) -> None:
    while True:  # again if somebody else has changed them in between
        session = await store.get_session(session_id)
        if session is None:
            raise _missing(session_id)
        before = dict(session.metadata)
        removed = {name for name, value in changes.items() if value == ""}
        both = before | dict(changes)
        after = {name: value for name, value in both.items() if name not in removed}
        if after == before or not changes:
            return
        if len(after) > max(MAX_TAGS, len(before)):
            raise ValueError(f"the session would have {len(after)} tags; at most {MAX_TAGS}")
        if await store.replace_metadata(session_id, before, after):
            await store.add_event(session_id, TAGGED, {"tags": dict(changes)})
            return


def _missing(session_id: str) -> SessionError:
    return SessionError(
        f"session {session_id!r} is not in this store; `agentic-proxy sessions list` prints all"
        " ids",
        status=404,
    )
