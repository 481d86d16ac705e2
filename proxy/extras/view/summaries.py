"""Sessions, turns and events as JSON for the page's lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import orjson

from proxy.extras.view.answers import (
    HeadJson,
    NewsJson,
    RatingJson,
    RefusalJson,
    SessionJson,
    StoredEvent,
)
from proxy.records import Reward
from proxy.records.binary import mark_fields, reward_fields
from proxy.store.browser import Recent, SessionSummary, TurnHead
from proxy.store.curation import RATING

MAX_METADATA_BYTES = 2_000


def summary_json(
    summary: SessionSummary,
    asked: str,
    said: Mapping[str, Any] | None,
    refused: Mapping[str, Any] | None,
) -> SessionJson:
    """`asked`: the user's first words; `said`: the last event of a person's rating; `refused`: that
    of a refused call."""
    session = summary.session
    metadata, origin = dict(session.metadata), session.origin
    if len(orjson.dumps(metadata)) > MAX_METADATA_BYTES:
        metadata = {"…": f"{len(metadata)} entries; `GET /sessions/ID` has them"}
    return {
        "id": session.session_id,
        "kind": session.kind,
        "status": session.status,
        "created_at": session.created_at,
        "completed_at": session.completed_at,
        "profile": session.profile,
        "metadata": metadata,
        "origin": None if origin is None else {"session": origin.session_id, "turn": origin.turn},
        "reward": session.reward,
        "marks": [mark_fields(mark) for mark in session.marks[:100]],
        "rewards": [reward_fields(reward) for reward in _first_rewards(session.rewards)],
        "turns": summary.turns + session.recorded_turns,
        "running": summary.running,
        "cut": summary.cut,
        "sampled_tokens": summary.sampled_tokens,
        "longest_path": summary.longest_path,
        "last_at": summary.last_at,
        "forks": summary.forks,
        "asked": asked,
        "rating": None if said is None else _rating(said),
        "refused": None if refused is None else _refusal(refused),
    }


def _first_rewards(rewards: Sequence[Reward]) -> list[Reward]:
    """At most 100, among them a person's rating."""
    return sorted(rewards, key=lambda reward: reward.key != RATING)[:100]


def _rating(said: Mapping[str, Any]) -> RatingJson:
    value, comment = said.get("value"), said.get("comment")
    return {
        "value": value if isinstance(value, int | float) else None,
        "comment": comment if isinstance(comment, str) else "",
    }


def _refusal(refused: Mapping[str, Any]) -> RefusalJson:
    return {"status": int(refused["status"]), "message": str(refused["message"])}


def head_json(head: TurnHead) -> HeadJson:
    return {
        "session": head.session_id,
        "index": head.index,
        "parent": head.parent,
        "after": head.after,
        "same_as": head.same_as,
        "fork": head.fork_cause,
        "status": head.status,
        "finish": head.finish_reason,
        "dialect": head.dialect,
        "agent": head.agent_id,
        "shared": head.shared_tokens,
        "new": head.new_tokens,
        "sampled": head.sampled_tokens,
        "versions": [(span.version, span.start, span.end) for span in head.versions],
        "started_at": head.started_at,
        "first_token_s": head.first_token_s,
        "duration_s": head.duration_s,
    }


def recent_json(recent: Recent) -> NewsJson:
    return {
        "begun": [head_json(head) for head in recent.begun],
        "answered": [head_json(head) for head in recent.answered],
        "events": cast("list[StoredEvent]", recent.events),
    }
