"""A recorded session as JSON for people and scripts."""

from __future__ import annotations

from typing import Any

import numpy as np

from proxy.records import Session, Turn, TurnStatus
from proxy.token_tree.paths import path


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
        "rewards": [
            {
                "key": reward.key,
                "value": reward.value,
                "parts": dict(reward.parts),
                "turn": reward.turn,
                "branch": reward.branch,
            }
            for reward in session.rewards
        ],
    }


def turn_view(turn: Turn) -> dict[str, Any]:
    return {
        "index": turn.index,
        "parent": turn.parent,
        "fork_cause": turn.fork_cause,
        "status": turn.status,
        "finish_reason": turn.finish_reason,
        "dialect": turn.dialect,
        "agent_id": turn.agent_id,
        "shared_tokens": turn.shared_tokens,
        "new_prompt_tokens": len(turn.prompt_ids),
        "sampled_tokens": len(turn.sampled_ids),
        "versions": [[span.version, span.start, span.end] for span in turn.versions],
        "sampling": dict(turn.sampling),
        "answer": turn.answer.decode() if turn.answer else None,
        "started_at": turn.started_at,
        "first_token_s": turn.first_token_s,
        "duration_s": turn.duration_s,
    }


def trajectories_view(turns: list[Turn]) -> list[dict[str, Any]]:
    """Every path from a root to a turn that no other turn continues in full, as `[T]` arrays of
    equal length.

    `sampled` marks the tokens that the policy sampled in DONE turns, each token exactly once: on
    the first of the paths that share it. `logprobs` are filled in wherever they are recorded.
    """
    whole = {
        turn.parent
        for turn in turns
        if turn.parent is not None and turn.shared_tokens == turns[turn.parent].path_tokens
    }
    marked = [0] * len(turns)
    return [_trajectory(turns, turn.index, marked) for turn in turns if turn.index not in whole]


def _trajectory(turns: list[Turn], leaf: int, marked: list[int]) -> dict[str, Any]:
    """`marked` holds, per turn, the number of sampled tokens already marked; it is updated."""
    ids = path(turns, leaf)
    sampled = np.zeros(len(ids), np.bool_)
    logprobs = np.zeros(len(ids), np.float32)
    index: int | None = leaf
    length = len(ids)
    chain = []
    while index is not None:
        turn = turns[index]
        start, end = turn.prompt_tokens, min(length, turn.path_tokens)
        if end > start:
            sampled[start + marked[index] : end] = turn.status is TurnStatus.DONE
            marked[index] = max(marked[index], end - start)
            logprobs[start:end] = turn.logprobs[: end - start]
        chain.append(index)
        index, length = turn.parent, min(length, turn.shared_tokens)
    return {"turns": chain[::-1], "ids": ids, "sampled": sampled, "logprobs": logprobs}
