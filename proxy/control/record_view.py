"""A recorded session as people and scripts read it: JSON, without what only machines need."""

from __future__ import annotations

from typing import Any

import numpy as np

from proxy.records import Session, Turn, TurnStatus
from proxy.token_tree import TokenTree


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
    """Every path from a root to a turn that nothing continues; `[T]` arrays of equal length.

    `sampled` marks tokens that the policy sampled in a turn that is DONE; a token that several
    paths share is marked in each. (Which of them trains is the trainer's to decide, once.)
    """
    tree = TokenTree(turns)
    inner = {turn.parent for turn in turns}
    return [_trajectory(tree, turns, turn.index) for turn in turns if turn.index not in inner]


def _trajectory(tree: TokenTree, turns: list[Turn], leaf: int) -> dict[str, Any]:
    ids = tree.path(leaf)
    sampled = np.zeros(len(ids), np.bool_)
    logprobs = np.zeros(len(ids), np.float32)
    index: int | None = leaf
    length = len(ids)
    chain = []
    while index is not None:
        turn = turns[index]
        start, end = turn.prompt_tokens, min(length, turn.path_tokens)
        if end > start:
            sampled[start:end] = turn.status is TurnStatus.DONE
            logprobs[start:end] = turn.logprobs[: end - start]
        chain.append(index)
        index, length = turn.parent, min(length, turn.shared_tokens)
    return {"turns": chain[::-1], "ids": ids, "sampled": sampled, "logprobs": logprobs}
