"""The tokens that top-k, top-p and a grammar left of the distribution from which a token was
sampled.

The engine's log-probability is that of the rest, so the trainer computes its own over the same
tokens. They are the recorded alternatives: the engine reports no token that it has excluded.
Invariant: the recorded tokens hold all of the probability, or the token is not trained.

Shapes: `S` sampled tokens of a turn, `T` tokens, `K` tokens that are left of the vocabulary, at
most.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from agent_loop.errors import TrajectoryError
from proxy.records import Turn
from proxy.sampling import untrainable

KeptTokens = npt.NDArray[np.int32]
"""`[T, K]`, token ids; -1 fills the rest of a row. A row of -1 stands for the whole vocabulary."""
NONE = -1
LOST = 1e-5
"""Largest probability, in sum, of tokens that are left and not recorded. The trainer's
log-probability is wrong by about as much."""


def is_restricted(turn: Turn) -> bool:
    """Whether a grammar bound the answer, top-k left at most as many tokens as the session records,
    or the sampling was bent otherwise. What verl's top-k leaves is not recorded."""
    few = 0 < turn.sampling.get("top_k", -1) <= turn.sampling.get("alternatives", 0)
    return few or "structured" in turn.sampling or _is_bent(turn)


def _is_bent(turn: Turn) -> bool:
    """Whether penalties or min-p changed the distribution, as in the records of hand-made
    sessions; new ones are refused."""
    return next(untrainable(turn.sampling), None) is not None


def kept_by(turn: Turn) -> tuple[KeptTokens, npt.NDArray[np.bool_]]:
    """`[S, K]`: what was left at each sampled token of a restricted turn; and `[S]`: whether that
    is all. It is not where more tokens than are recorded have the same logit as the last one, in an
    answer with a grammar whose engine reports none, and in one with penalties or min-p.

    Raises TrajectoryError: no alternatives are recorded where every answer must have some.
    """
    rows, sampled = turn.alternatives, len(turn.sampled_ids)
    bent = _is_bent(turn)
    if bent or rows is None or len(rows) != sampled:
        if bent or "structured" in turn.sampling:
            return np.full((sampled, 1), NONE, np.int32), np.zeros(sampled, np.bool_)
        raise TrajectoryError(
            f"session {turn.session_id!r} turn {turn.index}: sampled with top-k, and what that "
            "left is not recorded; the engine must report the most probable tokens (--max-logprobs)"
        )
    with np.errstate(under="ignore"):
        lost = 1.0 - np.exp(rows["logprob"].astype(np.float64)).sum(1)
    known = (rows["id"] == turn.sampled_ids[:, None]).any(1) & (lost <= LOST)
    return np.where(known[:, None], rows["id"], np.int32(NONE)), known


def after_prompt(prompt: int, kept: KeptTokens) -> KeptTokens:
    """`[T, K]`: rows of -1 for the tokens of the prompt before those of `kept`."""
    return np.concatenate([np.full((prompt, kept.shape[1]), NONE, np.int32), kept])


def joined(parts: Sequence[tuple[int, KeptTokens | None]]) -> KeptTokens | None:
    """The rows of parts that follow each other, each with its number of tokens."""
    some = [kept for _, kept in parts if kept is not None]
    if not some:
        return None
    columns = max(kept.shape[1] for kept in some)
    whole = np.full((sum(count for count, _ in parts), columns), NONE, np.int32)
    start = 0
    for count, kept in parts:
        if kept is not None:
            whole[start : start + count, : kept.shape[1]] = kept
        start += count
    return whole
