"""The paths of a token tree as arrays, with each sampled token marked exactly once.

Invariant: over all paths of a session, `sampled` marks every token that was sampled in a DONE turn
once: on the first of the paths that share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from proxy.records import Ids, ImageSpan, Logprobs, Turn, TurnStatus
from proxy.records.images import within
from proxy.token_tree.paths import path, prefix_images


@dataclass(frozen=True, slots=True)
class SampledPath:
    """A path from a root to a turn that no other turn continues in full; all arrays are `[T]`."""

    turns: list[int]
    """Indices of the turns on the path, from the root."""
    ids: Ids
    """Below 0 for tokens of `images`."""
    sampled: npt.NDArray[np.bool_]
    """True for the tokens that the policy sampled, unless an earlier path has them."""
    logprobs: Logprobs
    """As recorded, also for sampled tokens of earlier paths; 0 for tokens of a prompt."""
    versions: Ids
    """The version of the weights that sampled a token; -1 where `sampled` is False."""
    temperatures: npt.NDArray[np.float32]
    """The temperature that a token was sampled at; 1 where `sampled` is False."""
    images: tuple[ImageSpan, ...] = ()

    def up_to_the_last_sampled(self) -> SampledPath:
        """The path without the tokens after the last one that `sampled` marks."""
        marked = np.flatnonzero(self.sampled)
        end = int(marked[-1]) + 1 if len(marked) else 0
        return SampledPath(
            self.turns,
            self.ids[:end],
            self.sampled[:end],
            self.logprobs[:end],
            self.versions[:end],
            self.temperatures[:end],
            within(self.images, 0, end),
        )

    def without(self, left_out: npt.NDArray[np.bool_]) -> SampledPath:
        """The path in which the tokens that `left_out` marks, `[T]`, do not count as sampled."""
        return replace(
            self,
            sampled=self.sampled & ~left_out,
            versions=np.where(left_out, np.int32(-1), self.versions),
            temperatures=np.where(left_out, np.float32(1), self.temperatures),
        )


def sampled_paths(turns: Sequence[Turn]) -> list[SampledPath]:
    """All paths, in the order of their last turns."""
    whole = {
        turn.parent
        for turn in turns
        if turn.parent is not None and turn.shared_tokens == turns[turn.parent].path_tokens
    }
    marked = [0] * len(turns)
    return [_path(turns, turn.index, marked) for turn in turns if turn.index not in whole]


def _path(turns: Sequence[Turn], leaf: int, marked: list[int]) -> SampledPath:
    """`marked` holds, per turn, the number of sampled tokens already marked; it is updated."""
    ids = path(turns, leaf)
    sampled = np.zeros(len(ids), np.bool_)
    logprobs = np.zeros(len(ids), np.float32)
    versions = np.full(len(ids), -1, np.int32)
    temperatures = np.ones(len(ids), np.float32)
    index: int | None = leaf
    length = len(ids)
    chain = []
    while index is not None:
        turn = turns[index]
        start, end = turn.prompt_tokens, min(length, turn.path_tokens)
        if end > start:
            logprobs[start:end] = turn.logprobs[: end - start]
            new = slice(start + marked[index], end)
            marked[index] = max(marked[index], end - start)
            if turn.status is TurnStatus.DONE and new.start < end:
                sampled[new] = True
                versions[new] = _versions(turn)[new.start - start : end - start]
                temperatures[new] = turn.sampling.get("temperature", 1.0)
        chain.append(index)
        index, length = turn.parent, min(length, turn.shared_tokens)
    images = prefix_images(turns, leaf, len(ids))
    return SampledPath(chain[::-1], ids, sampled, logprobs, versions, temperatures, images)


def _versions(turn: Turn) -> Ids:
    """The version of each sampled token, `[S]`."""
    versions = np.full(len(turn.sampled_ids), -1, np.int32)
    for span in turn.versions:
        versions[span.start : span.end] = span.version
    return versions
