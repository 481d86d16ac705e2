"""The compact binary form of a recorded session, which the trainer reads and `export` writes.

One msgpack map `{format, session, turns}`; arrays are raw little-endian bytes (ids int32,
log-probabilities float32), so that a session of 128k tokens is 1 MB and decodes in a millisecond;
routed experts, which are much larger, are bytes of `.npy`, and alternatives those of
`proxy.records.alternatives`.
Invariant: `decode_record(encode_record(session, turns)) == (session, turns)`, bit for bit, except
for the digest of the API key, which is left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
from pydantic import with_config
from typing_extensions import TypedDict

from proxy.http.valid_json import CLOSED
from proxy.records import (
    BranchMode,
    FinishReason,
    ForkCause,
    ImageSpan,
    Mark,
    Origin,
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

CONTENT_TYPE = "application/vnd.agentic.record+msgpack"
FORMAT = 1
"""Incremented when a field changes its meaning; a reader refuses any other format."""


ImageFields = tuple[int, int, int, str, str, list[int]]
"""The values of an `ImageSpan`."""


class RecordFormatError(ValueError):
    """The bytes are not a record of this format."""


@with_config(CLOSED)
class MarkFields(TypedDict):
    """One entry of the field `marks`, as JSON: a search rule that a turn matches."""

    rule: str
    action: RuleAction
    turn: int
    at: float
    found: str


@with_config(CLOSED)
class RewardFields(TypedDict):
    """One entry of the field `rewards`, as JSON: of a session, or of one of its turns."""

    key: str
    value: float
    parts: dict[str, float]
    turn: int | None
    branch: bool


def encode_record(session: Session, turns: list[Turn]) -> bytes:
    return _ENCODER.encode(
        _Record(
            FORMAT,
            _encode_session(session),
            [_encode_turn(session.session_id, turn) for turn in turns],
        )
    )


def decode_record(data: bytes) -> tuple[Session, list[Turn]]:
    """Raises RecordFormatError. The arrays are read-only views into `data`."""
    try:
        record = _DECODER.decode(data)
        if record.format != FORMAT:
            raise RecordFormatError(f"unknown record format {record.format}, expected {FORMAT}")
        session_id = record.session.session_id
        return _decode_session(record.session), [_decode_turn(session_id, t) for t in record.turns]
    except (msgspec.DecodeError, msgspec.ValidationError, ValueError) as error:
        raise RecordFormatError(f"not a recorded session: {error}") from error


def reward_fields(reward: Reward) -> RewardFields:
    return {
        "key": reward.key,
        "value": reward.value,
        "parts": dict(reward.parts),
        "turn": reward.turn,
        "branch": reward.branch,
    }


def mark_fields(mark: Mark) -> MarkFields:
    return {
        "rule": mark.rule,
        "action": mark.action,
        "turn": mark.turn,
        "at": mark.at,
        "found": mark.found,
    }


def origin_fields(origin: Origin) -> dict[str, Any]:
    """The field `from` of a branch, as `POST /sessions` takes it."""
    return {
        "session": origin.session_id,
        "turn": origin.turn,
        "mode": origin.mode,
        "salvage": origin.salvage,
        "system": origin.system,
        "answer": origin.answer,
    }


def image_fields(images: Iterable[ImageSpan]) -> list[ImageFields]:
    """The values of each image, for JSON and msgpack."""
    return [(i.offset, i.tokens, i.token, i.digest, i.sha256, list(i.grid)) for i in images]


def images_of(
    fields: Iterable[ImageFields],
) -> tuple[ImageSpan, ...]:
    """Reads `image_fields`."""
    return tuple(
        ImageSpan(offset, tokens, token, digest, sha256, tuple(grid))
        for offset, tokens, token, digest, sha256, grid in fields
    )


class _SessionFields(msgspec.Struct, array_like=True):
    session_id: str
    kind: str
    status: str
    created_at: float
    expires_at: float
    sampling: dict[str, Any]
    profile: str
    limits: dict[str, Any]
    metadata: dict[str, Any]
    rewards: list[tuple[str, float, dict[str, float], int | None, bool]]
    completed_at: float | None
    origin: tuple[str, int, str, bool, str | None, str | None] | None = None
    marks: list[tuple[str, str, int, float, str]] = []


class _TurnFields(msgspec.Struct, array_like=True):
    index: int
    parent: int | None
    shared_tokens: int
    fork_cause: str | None
    prompt_ids: bytes
    request_key: bytes
    sampling: dict[str, Any]
    dialect: str
    sampled_ids: bytes
    logprobs: bytes
    versions: list[tuple[int, int, int]]
    finish_reason: str | None
    status: str
    answer_key: bytes
    answer: bytes
    agent_id: str | None
    started_at: float
    first_token_s: float | None
    duration_s: float | None
    request: bytes = b""
    recorded_by: str | None = None
    """The session that recorded the turn, if it is another one (`proxy.records.Origin`)."""
    engine: str = ""
    routed_experts: bytes | None = None
    alternatives: bytes | None = None
    images: list[ImageFields] = []


class _Record(msgspec.Struct):
    format: int
    session: _SessionFields
    turns: list[_TurnFields]


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Record)


def _encode_session(session: Session) -> _SessionFields:
    return _SessionFields(
        session.session_id,
        session.kind.value,
        session.status.value,
        session.created_at,
        session.expires_at,
        dict(session.sampling),
        session.profile,
        dict(session.limits),
        dict(session.metadata),
        [(r.key, r.value, dict(r.parts), r.turn, r.branch) for r in session.rewards],
        session.completed_at,
        None if (o := session.origin) is None else _encode_origin(o),
        [(m.rule, m.action.value, m.turn, m.at, m.found) for m in session.marks],
    )


def _encode_origin(o: Origin) -> tuple[str, int, str, bool, str | None, str | None]:
    return (o.session_id, o.turn, o.mode.value, o.salvage, o.system, o.answer)


def _decode_session(fields: _SessionFields) -> Session:
    return Session(
        session_id=fields.session_id,
        key_hash=b"",
        kind=SessionKind(fields.kind),
        status=SessionStatus(fields.status),
        created_at=fields.created_at,
        expires_at=fields.expires_at,
        sampling=fields.sampling,
        profile=fields.profile,
        limits=fields.limits,
        metadata=fields.metadata,
        rewards=[
            Reward(key, value, parts, turn, branch)
            for key, value, parts, turn, branch in fields.rewards
        ],
        completed_at=fields.completed_at,
        origin=None if fields.origin is None else _decode_origin(*fields.origin),
        marks=[
            Mark(rule, RuleAction(action), turn, at, found)
            for rule, action, turn, at, found in fields.marks
        ],
    )


def _decode_origin(
    session_id: str, turn: int, mode: str, salvage: bool, system: str | None, answer: str | None
) -> Origin:
    return Origin(session_id, turn, BranchMode(mode), salvage, system, answer)


def _encode_turn(session_id: str, turn: Turn) -> _TurnFields:
    return _TurnFields(
        turn.index,
        turn.parent,
        turn.shared_tokens,
        turn.fork_cause.value if turn.fork_cause else None,
        turn.prompt_ids.astype("<i4", copy=False).tobytes(),
        turn.request_key,
        dict(turn.sampling),
        turn.dialect,
        turn.sampled_ids.astype("<i4", copy=False).tobytes(),
        turn.logprobs.astype("<f4", copy=False).tobytes(),
        [(span.version, span.start, span.end) for span in turn.versions],
        turn.finish_reason.value if turn.finish_reason else None,
        turn.status.value,
        turn.answer_key,
        turn.answer,
        turn.agent_id,
        turn.started_at,
        turn.first_token_s,
        turn.duration_s,
        turn.request,
        None if turn.session_id == session_id else turn.session_id,
        turn.engine,
        routed_experts.dump(turn.routed_experts),
        alternatives.dump(turn.alternatives),
        image_fields(turn.images),
    )


def _decode_turn(session_id: str, fields: _TurnFields) -> Turn:
    return Turn(
        session_id=fields.recorded_by or session_id,
        index=fields.index,
        parent=fields.parent,
        shared_tokens=fields.shared_tokens,
        fork_cause=ForkCause(fields.fork_cause) if fields.fork_cause else None,
        prompt_ids=np.frombuffer(fields.prompt_ids, "<i4"),
        request_key=fields.request_key,
        sampling=fields.sampling,
        dialect=fields.dialect,
        sampled_ids=np.frombuffer(fields.sampled_ids, "<i4"),
        logprobs=np.frombuffer(fields.logprobs, "<f4"),
        versions=tuple(VersionSpan(*span) for span in fields.versions),
        finish_reason=FinishReason(fields.finish_reason) if fields.finish_reason else None,
        status=TurnStatus(fields.status),
        answer_key=fields.answer_key,
        answer=fields.answer,
        agent_id=fields.agent_id,
        started_at=fields.started_at,
        first_token_s=fields.first_token_s,
        duration_s=fields.duration_s,
        request=fields.request,
        engine=fields.engine,
        routed_experts=routed_experts.load(fields.routed_experts),
        alternatives=alternatives.load(fields.alternatives),
        images=images_of(fields.images),
    )
