"""A recorded session as JSON for people and scripts."""

from __future__ import annotations

from typing import Any

from proxy.records import ImageSpan, Session, Turn
from proxy.records.binary import mark_fields, origin_fields, reward_fields
from proxy.records.images import engine_ids
from proxy.token_tree.sampled_paths import sampled_paths


def session_view(session: Session) -> dict[str, Any]:
    return {
        "trial_id": session.session_id,
        "kind": session.kind,
        "status": session.status,
        "created_at": session.created_at,
        "expires_at": session.expires_at,
        "completed_at": session.completed_at,
        "sampling": dict(session.sampling),
        "profile": session.profile,
        "limits": dict(session.limits),
        "metadata": dict(session.metadata),
        "from": None if session.origin is None else origin_fields(session.origin),
        "rewards": [reward_fields(reward) for reward in session.rewards],
        "marks": [mark_fields(mark) for mark in session.marks],
    }


def turn_view(session_id: str, turn: Turn) -> dict[str, Any]:
    return {
        "index": turn.index,
        "recorded_by": None if turn.session_id == session_id else turn.session_id,
        "parent": turn.parent,
        "fork_cause": turn.fork_cause,
        "status": turn.status,
        "finish_reason": turn.finish_reason,
        "dialect": turn.dialect,
        "agent_id": turn.agent_id,
        "shared_tokens": turn.shared_tokens,
        "new_prompt_tokens": len(turn.prompt_ids),
        "sampled_tokens": len(turn.sampled_ids),
        "images": [image_view(image) for image in turn.images],
        "versions": [[span.version, span.start, span.end] for span in turn.versions],
        "sampling": dict(turn.sampling),
        "answer": turn.answer.decode() if turn.answer else None,
        "started_at": turn.started_at,
        "first_token_s": turn.first_token_s,
        "duration_s": turn.duration_s,
    }


def image_view(image: ImageSpan) -> dict[str, Any]:
    return {"offset": image.offset, "tokens": image.tokens, "sha256": image.sha256}


def trajectories_view(turns: list[Turn]) -> list[dict[str, Any]]:
    """The paths of the token tree (`token_tree.sampled_paths`), as `[T]` arrays of equal length."""
    return [
        {
            "turns": p.turns,
            "ids": engine_ids(p.ids, p.images),
            "sampled": p.sampled,
            "logprobs": p.logprobs,
            "images": [image_view(image) for image in p.images],
        }
        for p in sampled_paths(turns)
    ]
