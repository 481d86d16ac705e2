"""A recorded session scored again: the proof that what was recorded is what was sampled.

Each path of the token tree goes to an engine as it stands, and the log-probabilities that come back
are compared with those that were recorded at sampling. With the same weights they differ by the
engine's own noise; a token, a position or a temperature that is off by one differs by nats.

A path is scored in one call where its turns were sampled from the model's own distribution. A turn
whose parameters bent that (temperature, top-p, …) is scored token by token under the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from proxy.records import Ids, Logprobs, Turn, TurnStatus
from proxy.token_tree import TokenTree

_BENDING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Whose effect on a token depends on its path alone, with what leaves it as it is."""
_LOOKING_BACK = ("presence_penalty", "frequency_penalty", "structured")
"""Whose effect depends on where the answer began, which an engine that scores is not told."""


class Scorer(Protocol):
    """Raises EngineError or RequestError when the engine does not score."""

    async def path(self, ids: Ids) -> Logprobs:
        """`[T]` ids → `[T]` log-probabilities, each given the ids before it, at temperature 1."""
        ...

    async def sampled(self, path: Ids, count: int, params: Mapping[str, Any]) -> Logprobs:
        """`[count]`, of the last ids of a path, under these sampling parameters (`_BENDING`)."""
        ...


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


async def replay(turns: list[Turn], scorer: Scorer) -> tuple[list[Replayed], list[str]]:
    """The turns compared, in order, and why others could not be.

    Raises EngineError or RequestError when the engine does not score.
    """
    tree = TokenTree(turns)
    skipped = [f"turn {turn.index}: {why}" for turn in turns if (why := _why_not(turn))]
    compared: dict[int, Replayed] = {}
    for turn in turns:
        if not _why_not(turn) and _bent(turn):
            params = {name: turn.sampling.get(name, value) for name, value in _BENDING.items()}
            path = tree.path(turn.index)
            again = await scorer.sampled(path, len(turn.sampled_ids), params)
            compared[turn.index] = _compare(turn, again)
    plain = {turn.index for turn in turns if not _why_not(turn) and not _bent(turn)}
    for leaf in turns:
        found = [
            turn
            for turn, length in _chain(turns, leaf)
            if turn.index in plain and length >= turn.path_tokens
        ]
        if not found or _compared_by_a_child(leaf, turns):
            continue
        scored = await scorer.path(tree.path(leaf.index))
        for turn in found:
            plain.remove(turn.index)
            compared[turn.index] = _compare(turn, scored[turn.prompt_tokens : turn.path_tokens])
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
    if np.isnan(turn.logprobs).any():
        return "has no log-probabilities: its engine tells text only"
    for name in _LOOKING_BACK:
        if turn.sampling.get(name):
            return f"was sampled with {name}, which cannot be scored behind a given prompt"
    return ""


def _bent(turn: Turn) -> bool:
    return any(turn.sampling.get(name, neutral) != neutral for name, neutral in _BENDING.items())


def _compare(turn: Turn, again: Logprobs) -> Replayed:
    difference = np.abs(again - turn.logprobs)
    return Replayed(
        turn.index,
        len(difference),
        float(difference.max()),
        float(difference.mean()),
        tuple(dict.fromkeys(span.version for span in turn.versions)),
    )
