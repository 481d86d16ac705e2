"""Token tree → segments → trajectories: which tokens of a recorded session are trained, and where.

Invariant: `mask` is True for exactly the tokens that the policy sampled in answered turns, each in
exactly one segment; and a path from a root segment to a leaf is, id by id, a prefix of the prompt
and answer of one engine call.

The algorithm: A turn's own tokens (its prompt after the tokens that it shares with its parent, then
its answer) form one *block*. The block is attached to the parent's path after `shared_tokens`
tokens, a point that may lie in the block of an earlier ancestor: `_attach` finds that block. `_cut`
cuts each block where others are attached, and `prune` drops segments that lead to no trained
token. All steps are numpy operations on whole blocks; nothing loops over tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from agent_loop import kept_tokens
from agent_loop.errors import TrajectoryError
from agent_loop.kept_tokens import KeptTokens
from agent_loop.records import Mask, Segment, Trajectory
from proxy.errors import ImageError, ProxyError
from proxy.records import Ids, ImageSpan, Logprobs, Turn
from proxy.records.expert_rows import Routing, joined, routing_of
from proxy.records.images import check_images, moved, within


def build_segments(
    turns: Sequence[Turn], *, untrained: Collection[int] = (), imitated: bool = False
) -> tuple[Segment, ...]:
    """The session's tree; each segment comes after its parent.

    `untrained` holds the indices of turns without credit (`credit.py`), which are context like any
    prompt. For an EVAL session the caller passes all indices. With `imitated`, the answers are
    those of a teacher: they may lack log-probabilities and versions, which then are NaN and -1, so
    that no policy-gradient loss can be computed of them.

    Raises:
        TrajectoryError: the turns are not a tree of sampled tokens.
    """
    for index, turn in enumerate(turns):
        _check_tree(turn, index)
        if turn.sampled and not imitated and index not in untrained:
            _check_sampled(turn, index)
    hangs = _attach(turns)
    try:
        routings = routing_of(turns)
    except ProxyError as error:
        raise TrajectoryError(str(error)) from error
    blocks = [
        _block(turn, index, index not in untrained, routing, imitated)
        for index, (turn, routing) in enumerate(zip(turns, routings, strict=True))
    ]
    try:
        for block in blocks:
            check_images(block.ids, block.images)
        segments = prune(_cut(blocks, hangs))
    except ImageError as error:
        raise TrajectoryError(f"session {turns[0].session_id!r}: {error}") from error
    _check_trained(turns, untrained, blocks, segments)
    return segments


def flatten(segments: Sequence[Segment]) -> list[Trajectory]:
    """One trajectory per leaf. A segment that several trajectories share is trained in the first of
    them and is context in the others.
    """
    inner = {segment.parent for segment in segments}
    claimed = np.zeros(len(segments), bool)
    trajectories = []
    for leaf in range(len(segments)):
        if leaf in inner:
            continue
        path = _path(segments, leaf)
        parts = [segments[i] for i in path]
        masks = [segments[i].mask & ~claimed[i] for i in path]
        claimed[path] = True
        mask = np.concatenate(masks)
        logprobs = np.concatenate([part.logprobs for part in parts])
        versions = np.concatenate([part.versions for part in parts])
        trajectories.append(
            Trajectory(
                ids=np.concatenate([part.ids for part in parts]),
                mask=mask,
                logprobs=np.where(mask, logprobs, np.float32(0)),
                versions=np.where(mask, versions, np.int32(-1)),
                turns=np.concatenate([part.turns for part in parts]),
                routing=joined([(len(part.ids), part.routing) for part in parts]),
                kept=kept_tokens.joined([(len(part.ids), part.kept) for part in parts]),
                images=_images_of(parts),
            )
        )
    return trajectories


def _images_of(parts: Sequence[Segment]) -> tuple[ImageSpan, ...]:
    """The images of segments that follow each other."""
    images: list[ImageSpan] = []
    start = 0
    for part in parts:
        images += moved(part.images, start)
        start += len(part.ids)
    return tuple(images)


@dataclass(slots=True)
class _Block:
    """One turn's own tokens; arrays as in `Segment`, all `[T]`."""

    ids: Ids
    mask: Mask
    logprobs: Logprobs
    versions: Ids
    turn: int
    routing: Routing | None
    kept: KeptTokens | None
    images: tuple[ImageSpan, ...]

    def piece(self, parent: int, start: int, end: int) -> Segment:
        return Segment(
            parent=parent,
            ids=self.ids[start:end],
            mask=self.mask[start:end],
            logprobs=self.logprobs[start:end],
            versions=self.versions[start:end],
            turns=np.full(end - start, self.turn, np.int32),
            routing=None if self.routing is None else self.routing[start:end],
            kept=None if self.kept is None else self.kept[start:end],
            images=within(self.images, start, end),
        )


@dataclass(frozen=True, slots=True)
class _Hang:
    """Where a block is attached: after `offset` tokens of block `block`; -1 for a root."""

    block: int
    offset: int


def _block(
    turn: Turn, index: int, credited: bool, routing: Routing | None, imitated: bool
) -> _Block:
    prompt, sampled = len(turn.prompt_ids), len(turn.sampled_ids)
    trained = turn.sampled and credited
    mask = np.zeros(prompt + sampled, bool)
    logprobs = np.zeros(prompt + sampled, np.float32)
    versions = np.full(prompt + sampled, -1, np.int32)
    kept = None
    if trained:
        mask[prompt:] = True
        logprobs[prompt:] = turn.logprobs
        for span in turn.versions:
            versions[prompt + span.start : prompt + span.end] = span.version
    if trained and not imitated and kept_tokens.is_restricted(turn):
        left, mask[prompt:] = kept_tokens.kept_by(turn)
        kept = kept_tokens.after_prompt(prompt, left)
        logprobs[~mask], versions[~mask] = 0.0, -1
    ids = np.concatenate([turn.prompt_ids, turn.sampled_ids]).astype(np.int32, copy=False)
    return _Block(ids, mask, logprobs, versions, index, routing, kept, turn.images)


def _check_tree(turn: Turn, index: int) -> None:
    where = f"session {turn.session_id!r} turn {index}"
    if turn.index != index:
        raise TrajectoryError(f"{where}: has index {turn.index}; pass all turns, in order")
    if turn.parent is not None and not 0 <= turn.parent < index:
        raise TrajectoryError(f"{where}: parent {turn.parent} is not an earlier turn")


def _check_trained(
    turns: Sequence[Turn],
    untrained: Collection[int],
    blocks: Sequence[_Block],
    segments: Sequence[Segment],
) -> None:
    """Raises TrajectoryError: the segments train more or fewer tokens than were recorded as sampled
    in the turns with credit, but for those whose alternatives are not all recorded."""
    sampled = sum(
        len(turn.sampled_ids) if block.kept is None else int(block.mask.sum())
        for index, (turn, block) in enumerate(zip(turns, blocks, strict=True))
        if turn.sampled and index not in untrained
    )
    trained = sum(int(segment.mask.sum()) for segment in segments)
    if trained != sampled:
        raise TrajectoryError(
            f"session {turns[0].session_id!r}: {sampled} sampled tokens are recorded, but {trained}"
            " would be trained"
        )


def _check_sampled(turn: Turn, index: int) -> None:
    where = f"session {turn.session_id!r} turn {index}"
    sampled = len(turn.sampled_ids)
    if len(turn.logprobs) != sampled:
        raise TrajectoryError(
            f"{where}: {len(turn.logprobs)} log-probabilities for {sampled} sampled tokens"
        )
    if not np.isfinite(turn.logprobs).all():
        raise TrajectoryError(f"{where}: a log-probability is not finite")
    ends = [0, *(span.end for span in turn.versions)]
    if [span.start for span in turn.versions] != ends[:-1] or ends[-1] != sampled:
        raise TrajectoryError(
            f"{where}: version spans {turn.versions} do not cover its {sampled} sampled tokens"
        )


def _attach(turns: Sequence[Turn]) -> list[_Hang]:
    """Finds, for each turn, the block that holds the last token that it shares with its parent."""
    hangs: list[_Hang] = []
    for index, turn in enumerate(turns):
        owner, shared = turn.parent, turn.shared_tokens
        if shared and (owner is None or shared > turns[owner].path_tokens):
            raise TrajectoryError(
                f"session {turn.session_id!r} turn {index}: shares {shared} tokens, "
                f"more than the path of its parent {owner}"
            )
        while owner is not None and shared <= turns[owner].shared_tokens:
            owner = turns[owner].parent
        if owner is None or shared == 0:
            hangs.append(_Hang(-1, 0))
        else:
            hangs.append(_Hang(owner, shared - turns[owner].shared_tokens))
    return hangs


def _cut(blocks: Sequence[_Block], hangs: Sequence[_Hang]) -> list[Segment]:
    """Cuts each block where other blocks are attached to it."""
    cuts: list[set[int]] = [{len(block.ids)} for block in blocks]
    for hang in hangs:
        if hang.block >= 0:
            cuts[hang.block].add(hang.offset)
    pieces: list[Segment] = []
    last_of: dict[tuple[int, int], int] = {}
    for index, (block, hang) in enumerate(zip(blocks, hangs, strict=True)):
        parent = last_of[hang.block, hang.offset] if hang.block >= 0 else -1
        start = 0
        for end in sorted(cuts[index]):
            if end > start:
                pieces.append(block.piece(parent, start, end))
                parent = len(pieces) - 1
            last_of[index, end] = parent
            start = end
    return pieces


def prune(pieces: Sequence[Segment]) -> tuple[Segment, ...]:
    """Drops whole branches without a trained token, and the tokens of a leaf after its last trained
    token."""
    leads = np.array([bool(piece.mask.any()) for piece in pieces], bool)
    children = np.zeros(len(pieces), int)
    for index in range(len(pieces) - 1, -1, -1):
        parent = pieces[index].parent
        if leads[index] and parent >= 0:
            leads[parent] = True
            children[parent] += 1
    kept: list[list[Segment]] = []
    parents: list[int] = []
    moved: dict[int, int] = {-1: -1}
    for index, piece in enumerate(pieces):
        if not leads[index]:
            continue
        if children[index] == 0:
            piece = _head(piece, int(np.flatnonzero(piece.mask)[-1]) + 1)
        if piece.parent >= 0 and children[piece.parent] == 1:
            moved[index] = moved[piece.parent]
            kept[moved[index]].append(piece)
        else:
            moved[index] = len(kept)
            kept.append([piece])
            parents.append(moved[piece.parent])
    return tuple(_join(parent, parts) for parent, parts in zip(parents, kept, strict=True))


def _head(piece: Segment, length: int) -> Segment:
    return Segment(
        piece.parent,
        piece.ids[:length],
        piece.mask[:length],
        piece.logprobs[:length],
        piece.versions[:length],
        piece.turns[:length],
        None if piece.routing is None else piece.routing[:length],
        None if piece.kept is None else piece.kept[:length],
        within(piece.images, 0, length),
    )


def _join(parent: int, parts: Sequence[Segment]) -> Segment:
    return Segment(
        parent=parent,
        ids=np.concatenate([part.ids for part in parts]),
        mask=np.concatenate([part.mask for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        versions=np.concatenate([part.versions for part in parts]),
        turns=np.concatenate([part.turns for part in parts]),
        routing=joined([(len(part.ids), part.routing) for part in parts]),
        kept=kept_tokens.joined([(len(part.ids), part.kept) for part in parts]),
        images=_images_of(parts),
    )


def _path(segments: Sequence[Segment], leaf: int) -> list[int]:
    path = []
    while leaf >= 0:
        path.append(leaf)
        leaf = segments[leaf].parent
    return path[::-1]
