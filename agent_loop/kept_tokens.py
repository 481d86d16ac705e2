"""The tokens that top-k and top-p left of the distribution from which a token was sampled.

The engine's log-probability is that of the rest, so the trainer computes its own over the same
tokens. They are the recorded alternatives: the engine reports no token that it has excluded.
Invariant: the recorded tokens hold all of the probability, or the turn is not trained.

Shapes: `T` tokens, `K` tokens that are left of the vocabulary, at most.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from agent_loop.errors import TrajectoryError
from proxy.records import Turn

KeptTokens = npt.NDArray[np.int32]
"""`[T, K]`, token ids; -1 fills the rest of a row. A row of -1 stands for the whole vocabulary."""
NONE = -1
LOST = 1e-5
"""Most probability that tokens may have which are left and not recorded: as much the trainer's
log-probability would be wrong."""


def is_restricted(turn: Turn) -> bool:
    """Whether top-k left at most as many tokens as are recorded. What a session samples otherwise,
    such as verl's, is not recorded."""
    return bool(0 < turn.sampling.get("top_k", -1) <= turn.sampling.get("alternatives", 0))


def kept_by(turn: Turn) -> KeptTokens:
    """`[S, K]`: what was left at each sampled token of a restricted turn.

    Raises TrajectoryError: they are not recorded, or not all of them are.
    """
    where = f"session {turn.session_id!r} turn {turn.index}"
    rows, sampled = turn.alternatives, len(turn.sampled_ids)
    if rows is None or len(rows) != sampled:
        raise TrajectoryError(
            f"{where}: sampled with top-k or top-p, and what these left is not recorded; "
            "the engine must report log-probabilities of the most probable tokens"
        )
    kept: KeptTokens = np.ascontiguousarray(rows["id"])
    with np.errstate(under="ignore"):
        lost = 1.0 - np.exp(rows["logprob"].astype(np.float64)).sum(1)
    absent = ~(kept == turn.sampled_ids[:, None]).any(1)
    wrong = np.flatnonzero(absent | ~(lost <= LOST))
    if len(wrong):
        token = int(wrong[0])
        raise TrajectoryError(
            f"{where}: top-k and top-p left more tokens at {len(wrong)} of {sampled} positions "
            f"than the {kept.shape[1]} that are recorded (token {token}: a probability of "
            f"{max(0.0, lost[token]):.1e} is missing); tokens of equal logits stay together, so "
            "lower rollout.top_k or rollout.top_p"
        )
    return kept


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
