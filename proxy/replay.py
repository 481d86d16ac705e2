"""A recorded session scored again: the proof that what was recorded is what was sampled.

Each path of the token tree goes to an engine as it stands, and the log-probabilities that come back
are compared with those that were recorded at sampling. With the same weights they differ by the
engine's own noise; a token, a position or a temperature that is off by one differs by nats.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np

from proxy.records import Ids, Logprobs, Turn, TurnStatus
from proxy.token_tree import TokenTree

Score = Callable[[Ids], Awaitable[Logprobs]]
"""`[T]` ids → `[T]` log-probabilities, each given the ids before it, at temperature 1."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """One turn, compared. Example: Replayed(turn=3, tokens=42, largest=0.0021, mean=0.0003)"""

    turn: int
    tokens: int
    largest: float
    """Largest absolute difference of log-probability over its sampled tokens, in nats."""
    mean: float
    versions: tuple[int, ...]
    """Of the weights that sampled it."""


async def replay(turns: list[Turn], score: Score) -> tuple[list[Replayed], list[str]]:
    """The turns compared, in order, and why others could not be.

    Raises EngineError or RequestError when the engine does not score.
    """
    tree = TokenTree(turns)
    inner = {turn.parent for turn in turns}
    compared: dict[int, Replayed] = {}
    skipped = [f"turn {turn.index}: {why}" for turn in turns if (why := _why_not(turn))]
    for leaf in turns:
        if leaf.index in inner and _compared_by_a_child(leaf, turns):
            continue
        path = tree.path(leaf.index)
        if len(path) == 0:
            continue
        scored = await score(path)
        for turn, length in _chain(turns, leaf):
            if turn.index not in compared and not _why_not(turn) and length >= turn.path_tokens:
                compared[turn.index] = _compare(turn, scored)
    return [compared[index] for index in sorted(compared)], skipped


def _compared_by_a_child(turn: Turn, turns: list[Turn]) -> bool:
    """Whether some turn's path runs through the whole of this one's."""
    return any(t.parent == turn.index and t.shared_tokens >= turn.path_tokens for t in turns)


def _chain(turns: list[Turn], leaf: Turn) -> list[tuple[Turn, int]]:
    """The turns on a leaf's path, each with how many tokens of its own path are on it."""
    chain, length = [(leaf, leaf.path_tokens)], leaf.shared_tokens
    while leaf.parent is not None:
        leaf = turns[leaf.parent]
        chain.append((leaf, length))
        length = min(length, leaf.shared_tokens)
    return chain


def _why_not(turn: Turn) -> str:
    """Empty where the turn can be compared."""
    if turn.status is not TurnStatus.DONE or not len(turn.sampled_ids):
        return f"is {turn.status}"
    if turn.sampling.get("temperature", 1.0) != 1.0:
        return f"was sampled at temperature {turn.sampling['temperature']}, an engine scores at 1"
    if turn.sampling.get("structured") is not None:
        return "was sampled under a grammar"
    bent = [
        name
        for name, neutral in (("top_p", 1.0), ("top_k", -1), ("min_p", 0.0))
        if turn.sampling.get(name, neutral) != neutral
    ]
    return f"was sampled with {', '.join(bent)}" if bent else ""


def _compare(turn: Turn, scored: Logprobs) -> Replayed:
    again = scored[turn.prompt_tokens : turn.path_tokens]
    difference = np.abs(again - turn.logprobs)
    return Replayed(
        turn.index,
        len(difference),
        float(difference.max()),
        float(difference.mean()),
        tuple(dict.fromkeys(span.version for span in turn.versions)),
    )
