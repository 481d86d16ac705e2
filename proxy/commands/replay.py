"""Scores a recorded session again, to prove that the record is what was sampled.

Each path of the token tree is sent to an engine unchanged, and the returned log-probabilities are
compared with the recorded ones. With the same weights they differ by the engine's numerical noise;
a wrong token, position or temperature makes differences of several nats.

A path whose turns were sampled from the model's own distribution is scored in one call. A turn
whose sampling parameters changed the distribution (temperature, top-p, …) is scored token by token
with the same parameters.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from proxy.commands.sessions import one_session, opened
from proxy.engines.vllm_scoring import VllmScorer
from proxy.errors import EngineError, RequestError
from proxy.records import Ids, ImageSpan, Logprobs, Turn, TurnStatus
from proxy.token_tree.paths import path, prefix_images

_BENDING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Parameters whose effect on a token depends only on its path, with their neutral values."""
_LOOKING_BACK = ("presence_penalty", "frequency_penalty", "structured")
"""Parameters whose effect depends on where the answer began, which is unknown when scoring."""


class Scorer(Protocol):
    """Scores ids with an engine. Raises EngineError or RequestError if the engine fails."""

    async def path(self, ids: Ids, images: Sequence[ImageSpan]) -> Logprobs:
        """`[T]` ids → `[T]` log-probabilities, each given the preceding ids, at temperature 1.
        `images`: those in the ids."""
        ...

    async def sampled(
        self, path: Ids, count: int, params: Mapping[str, Any], images: Sequence[ImageSpan]
    ) -> Logprobs:
        """`[count]` log-probabilities of a path's last ids under these sampling parameters."""
        ...


@dataclass(frozen=True, slots=True)
class ComparedTurn:
    """One turn, compared. Example: ComparedTurn(turn=3, tokens=42, largest=0.0021, mean=0.0003)"""

    turn: int
    tokens: int
    largest: float
    """Largest absolute difference of log-probability over its sampled tokens, in nats."""
    mean: float
    versions: tuple[int, ...]
    """Versions of the weights that sampled the turn."""


async def replay_session(arguments: Namespace) -> int:
    """Scores a session's turns again and prints the differences.

    Returns 1 if a difference exceeds the tolerance.
    """
    async with opened(arguments) as (store, _):
        _, turns = await one_session(store, arguments.trial_id)
        scorer = VllmScorer(arguments.engine, source=store)
        try:
            compared, skipped = await replay(turns, scorer)
        except RequestError as error:
            raise EngineError(error.message) from error
        finally:
            await scorer.close()
    for entry in compared:
        print(
            f"turn {entry.turn}: {entry.tokens} tokens of version "
            f"{', '.join(map(str, entry.versions))}: largest difference {entry.largest:.2e}, "
            f"mean {entry.mean:.2e}"
        )
    for why in skipped:
        print(why)
    largest = max((entry.largest for entry in compared), default=0.0)
    print(f"{len(compared)} of {len(turns)} turns compared, largest difference {largest:.2e}")
    failed = arguments.tolerance is not None and largest > arguments.tolerance
    if failed:
        print(
            f"the largest difference exceeds --tolerance {arguments.tolerance:g}", file=sys.stderr
        )
    return 1 if failed else 0


async def replay(turns: list[Turn], scorer: Scorer) -> tuple[list[ComparedTurn], list[str]]:
    """The turns compared, in order, and why others could not be.

    Raises EngineError or RequestError if the engine fails.
    """
    skipped = [f"turn {turn.index}: {why}" for turn in turns if (why := _why_not(turn))]
    compared: dict[int, ComparedTurn] = {}
    for turn in turns:
        if not _why_not(turn) and _bent(turn):
            params = {name: turn.sampling.get(name, value) for name, value in _BENDING.items()}
            ids, images = _path(turns, turn.index)
            again = await scorer.sampled(ids, len(turn.sampled_ids), params, images)
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
        scored = await scorer.path(*_path(turns, leaf.index))
        for turn in found:
            plain.remove(turn.index)
            compared[turn.index] = _compare(turn, scored[turn.prompt_tokens : turn.path_tokens])
    return [compared[index] for index in sorted(compared)], skipped


def _path(turns: list[Turn], index: int) -> tuple[Ids, tuple[ImageSpan, ...]]:
    """The whole path of a turn, and its images."""
    return path(turns, index), prefix_images(turns, index, turns[index].path_tokens)


def _compared_by_a_child(turn: Turn, turns: list[Turn]) -> bool:
    """Whether another turn continues this turn's whole path, so that it is scored with that one."""
    return any(t.parent == turn.index and t.shared_tokens >= turn.path_tokens for t in turns)


def _chain(turns: list[Turn], leaf: Turn) -> list[tuple[Turn, int]]:
    """The turns on a leaf's path, each with the number of tokens of its own path on it."""
    chain, length = [(leaf, leaf.path_tokens)], leaf.shared_tokens
    while leaf.parent is not None:
        leaf = turns[leaf.parent]
        chain.append((leaf, length))
        length = min(length, leaf.shared_tokens)
    return chain


def _why_not(turn: Turn) -> str:
    """Why the turn cannot be compared; empty if it can."""
    if turn.status is not TurnStatus.DONE or not len(turn.sampled_ids):
        return f"is {turn.status}"
    if np.isnan(turn.logprobs).any():
        return "has no log-probabilities, because its engine is text-only"
    for name in _LOOKING_BACK:
        if turn.sampling.get(name):
            return f"was sampled with {name}, which cannot be scored"
    return ""


def _bent(turn: Turn) -> bool:
    return any(turn.sampling.get(name, neutral) != neutral for name, neutral in _BENDING.items())


def _compare(turn: Turn, again: Logprobs) -> ComparedTurn:
    difference = np.abs(again - turn.logprobs)
    return ComparedTurn(
        turn.index,
        len(difference),
        float(difference.max()),
        float(difference.mean()),
        tuple(dict.fromkeys(span.version for span in turn.versions)),
    )
