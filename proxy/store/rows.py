"""Converts records to rows and back, for every store: arrays are little-endian blobs, mappings are
JSON.

Invariant: `turn_from_row(intent_row(t) + answer_row(t)) == t` for every turn, bit for bit. A row
holds only the tokens that its turn adds. Arrays from a row are read-only views of its bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from struct import Struct
from typing import Any

import msgspec
import numpy as np
import orjson
from msgspec.structs import replace

from proxy.errors import ProxyError, SessionError, StoreError
from proxy.records import (
    BranchMode,
    FinishReason,
    ForkCause,
    Ids,
    ImageSpan,
    Logprobs,
    Mark,
    Origin,
    RecordedImage,
    Reward,
    RuleAction,
    Session,
    SessionKind,
    SessionStatus,
    Turn,
    TurnStatus,
    VersionSpan,
    alternatives,
    routed_experts,
)
from proxy.records.binary import ImageFields, image_fields, images_of
from proxy.store.protocol import Undelivered

IMAGE_COLUMNS = "sha256, media_type, data"
SESSION_COLUMNS = (
    "session_id, key_hash, kind, status, created_at, expires_at, completed_at,"
    " sampling, profile, limits, metadata, origin_session, origin_turn, origin_salvages, origin"
)
INTENT_COLUMNS = (
    "session_id, idx, parent, shared_tokens, fork_cause, prompt_ids, request_key, sampling,"
    " dialect, agent_id, started_at, request, images"
)
ANSWER_COLUMNS = (
    "status, sampled_ids, logprobs, versions, finish_reason, answer_key, answer,"
    " first_token_s, duration_s, engine, routed_experts, alternatives"
)
MAY_COMMIT = "answers.status <> 'cut' OR excluded.status = 'cut'"
"""A turn that another process has closed as CUT does not become DONE any more: that process has
let the agent's retry be sampled."""
REWARD_COLUMNS = "reward_key, value, parts, turn, branch"
REPLACES_REWARD = (
    "ON CONFLICT (session_id, reward_key) DO UPDATE SET value = excluded.value,"
    " parts = excluded.parts, turn = excluded.turn, branch = excluded.branch"
)
OF_RULE = "? = '*' OR rule = ?"
"""The marks of the rule that both parameters name; of any rule for `*`."""
MARK_COLUMNS = "rule, action, turn, at, found"
TURN_COLUMNS = ", ".join(
    [f"t.{name.strip()}" for name in INTENT_COLUMNS.split(",")]
    + [f"a.{name.strip()}" for name in ANSWER_COLUMNS.split(",")]
    + ["t.owner", "l.trained = 1 AND t.idx >= l.salvaged"]
)
"""A turn as `lineage` has it: its row, its owner, and whether the session trains it."""
IN_LINEAGE = "t.session_id = l.session_id AND t.idx >= l.low AND t.idx < l.high"
_NO_END = 2**31 - 1
_SPAN = Struct("<3i")
_IMAGES = msgspec.json.Decoder(list[ImageFields])


def unrecorded(session_id: str, index: int, *, exists: bool) -> ProxyError:
    """Why no answer could be recorded for the turn: it `exists`, and is closed; or it does not."""
    if exists:
        return StoreError(
            f"turn {index} of session {session_id} was closed by another process: the store "
            "considered this one dead; try again"
        )
    return SessionError(
        f"session {session_id} has no turn {index}; was the session deleted?", status=404
    )


def no_session(session_id: str) -> SessionError:
    return SessionError(f"session {session_id} does not exist", status=404)


def lineage(session_id: str, *, least: str) -> str:
    """The beginning of a statement that reads a session and those that it branched from.

    `session_id` is the statement's parameter, `least` the database's name of the function. Each
    row of `lineage` is a session, with the indices `[low, high)` that its own turns have in the
    session that is read. That session trains the turns of a row if every branch from there on
    salvages, and only from `salvaged` on, because a branch that salvages it trains those before.
    """
    return (
        "WITH RECURSIVE lineage (session_id, low, high, trained, origin, salvages, salvaged) AS ("
        f" SELECT session_id, coalesce(origin_turn, 0), {_NO_END}, 1, origin_session,"
        " origin_salvages, coalesce((SELECT b.origin_turn FROM sessions b"
        " WHERE b.origin_session = s.session_id AND b.origin_salvages = 1), 0)"
        f" FROM sessions s WHERE session_id = {session_id}"
        f" UNION ALL SELECT s.session_id, coalesce(s.origin_turn, 0), {least}(l.low, l.high),"
        " l.trained * l.salvages, s.origin_session, s.origin_salvages, l.salvaged"
        " FROM lineage l JOIN sessions s ON s.session_id = l.origin)"
    )


def session_row(s: Session) -> tuple[Any, ...]:
    """Values of `SESSION_COLUMNS`."""
    return (
        s.session_id,
        s.key_hash,
        s.kind.value,
        s.status.value,
        s.created_at,
        s.expires_at,
        s.completed_at,
        json_object(s.sampling),
        s.profile,
        json_object(s.limits),
        json_object(s.metadata),
        *_origin_row(s.origin),
    )


def session_from_row(row: Sequence[Any], rewards: list[Reward]) -> Session:
    return Session(
        session_id=row[0],
        key_hash=bytes(row[1]),
        kind=SessionKind(row[2]),
        status=SessionStatus(row[3]),
        created_at=row[4],
        expires_at=row[5],
        completed_at=row[6],
        sampling=orjson.loads(row[7]),
        profile=row[8],
        limits=orjson.loads(row[9]),
        metadata=orjson.loads(row[10]),
        rewards=rewards,
        origin=_origin_from(row[11:15]),
    )


def _origin_row(o: Origin | None) -> tuple[Any, ...]:
    if o is None:
        return (None, None, 0, None)
    more = {"mode": o.mode, "system": o.system, "answer": o.answer}
    return (o.session_id, o.turn, int(o.salvage), orjson.dumps(more))


def _origin_from(row: Sequence[Any]) -> Origin | None:
    session_id, turn, salvages, more = row
    if session_id is None:
        return None
    fields = orjson.loads(more)
    mode = BranchMode(fields.pop("mode"))
    return Origin(session_id, turn, mode, salvage=bool(salvages), **fields)


def intent_row(t: Turn) -> tuple[Any, ...]:
    """Values of `INTENT_COLUMNS`: what is known before sampling."""
    return (
        t.session_id,
        t.index,
        t.parent,
        t.shared_tokens,
        t.fork_cause.value if t.fork_cause else None,
        _ids(t.prompt_ids),
        t.request_key,
        json_object(t.sampling),
        t.dialect,
        t.agent_id,
        t.started_at,
        t.request,
        msgspec.json.encode(image_fields(t.images)) if t.images else None,
    )


def answer_row(t: Turn) -> tuple[Any, ...]:
    """Values of `ANSWER_COLUMNS`: what is known after sampling."""
    return (
        t.status.value,
        _ids(t.sampled_ids),
        np.ascontiguousarray(t.logprobs, "<f4").tobytes(),
        _versions(t.versions),
        t.finish_reason.value if t.finish_reason else None,
        t.answer_key,
        t.answer,
        t.first_token_s,
        t.duration_s,
        t.engine,
        routed_experts.dump(t.routed_experts),
        alternatives.dump(t.alternatives),
    )


def turn_from_row(row: Sequence[Any]) -> Turn:
    """From `INTENT_COLUMNS` + `ANSWER_COLUMNS`; the latter are NULL for a turn without answer."""
    turn = Turn(
        session_id=row[0],
        index=row[1],
        parent=row[2],
        shared_tokens=row[3],
        fork_cause=ForkCause(row[4]) if row[4] else None,
        prompt_ids=_ids_from(row[5]),
        request_key=bytes(row[6]),
        sampling=orjson.loads(row[7]),
        dialect=row[8],
        agent_id=row[9],
        started_at=row[10],
        request=bytes(row[11]),
        images=spans_from_cell(row[12]),
    )
    if row[13] is None:
        return turn
    return replace(
        turn,
        status=TurnStatus(row[13]),
        sampled_ids=_ids_from(row[14]),
        logprobs=_logprobs_from(row[15]),
        versions=_versions_from(row[16]),
        finish_reason=FinishReason(row[17]) if row[17] else None,
        answer_key=bytes(row[18]),
        answer=bytes(row[19]),
        first_token_s=row[20],
        duration_s=row[21],
        engine=row[22] or "",
        routed_experts=routed_experts.load(row[23]),
        alternatives=alternatives.load(row[24]),
    )


def spans_from_cell(cell: bytes | None) -> tuple[ImageSpan, ...]:
    """Reads a turn's column `images`."""
    return images_of(_IMAGES.decode(cell)) if cell else ()


def image_from_row(row: Sequence[Any]) -> RecordedImage:
    """Raises StoreError: the bytes are not those that were recorded."""
    sha256, media_type, data = row
    if hashlib.sha256(data).hexdigest() != sha256:
        raise StoreError(f"the store's image {sha256} has other bytes than were recorded")
    return RecordedImage(sha256, media_type, bytes(data))


def check_origin(origin: Origin, found: Sequence[Any] | None) -> None:
    """`found`: the row of the origin's session, with the id of the branch that salvages it. Raises
    SessionError."""
    if found is None:
        raise SessionError(f"from: session {origin.session_id!r} does not exist", status=404)
    if origin.salvage and found[0] is not None:
        raise SessionError(
            f"from: session {origin.session_id!r} is salvaged by {found[0]!r} already; continue "
            "that one, or branch without salvage",
            status=409,
        )


def check_unreferred(session_id: str, branches: int) -> None:
    """Raises SessionError if branches refer to the session."""
    if branches:
        raise SessionError(
            f"session {session_id!r} cannot be deleted: {branches} branches refer to its turns; "
            "delete them first",
            status=409,
        )


def read_in_session(turn: Turn, *, trained: bool) -> Turn:
    """A stored turn as the session has it that is read; `trained`: whether that session trains
    it, and not another one that shares it (`proxy.records.Origin`)."""
    shared = turn.status is TurnStatus.DONE and not trained
    return replace(turn, status=TurnStatus.CONTEXT) if shared else turn


def reward_row(r: Reward) -> tuple[Any, ...]:
    """Values of `REWARD_COLUMNS`."""
    return (r.key, r.value, json_object(r.parts), r.turn, int(r.branch))


def reward_from_row(row: Sequence[Any]) -> Reward:
    return Reward(
        key=row[0],
        value=row[1],
        parts=orjson.loads(row[2]),
        turn=row[3],
        branch=bool(row[4]),
    )


def mark_from_row(row: Sequence[Any]) -> Mark:
    rule, action, turn, at, found = row
    return Mark(rule, RuleAction(action), turn, at, found)


def undelivered(
    found: Iterable[Sequence[Any]],
    replayed: Iterable[int],
    *,
    own: int,
    alive: Callable[[int], bool],
) -> Undelivered:
    """From `(idx, owner, arrived)` of the turns that are done and not marked as arrived, and the
    index of each recorded turn of a branch that is."""
    lost, pending = set(), set()
    for index, owner, arrived in found:
        if arrived is not None or not alive(owner):
            lost.add(index)
        elif owner != own:
            pending.add(index)
    return Undelivered(frozenset(lost), frozenset(pending), frozenset(replayed))


def json_object(value: Mapping[str, Any]) -> bytes:
    return orjson.dumps(value) if value else b"{}"


def _ids(ids: Ids) -> bytes:
    return np.ascontiguousarray(ids, "<i4").tobytes()


def _ids_from(blob: bytes) -> Ids:
    return np.frombuffer(blob, "<i4").view(np.int32)


def _logprobs_from(blob: bytes) -> Logprobs:
    return np.frombuffer(blob, "<f4").view(np.float32)


def _versions(spans: tuple[VersionSpan, ...]) -> bytes:
    return b"".join(_SPAN.pack(v.version, v.start, v.end) for v in spans)


def _versions_from(blob: bytes) -> tuple[VersionSpan, ...]:
    flat = np.frombuffer(blob, "<i4").reshape(-1, 3).tolist()
    return tuple(VersionSpan(*span) for span in flat)
