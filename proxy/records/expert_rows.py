"""The recorded choice of a mixture-of-experts model's router, along the token tree.

Invariant: the row of a token is that of the turn that added it. Only a token without one there,
such as the last token of an answer, gets the row of the first turn after it that has one.

Shapes: `T` tokens, `L` layers, `K` experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from proxy.errors import ProxyError
from proxy.records import RoutedExperts, Turn


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts of `T` tokens, some of which may not be known.

    Example: Routing(experts=[[[3 1]] [[0 0]]], known=[True False])  # two tokens, L=1, K=2
    """

    experts: RoutedExperts
    """`[T, L, K]`; anything where `known` is False."""
    known: npt.NDArray[np.bool_]
    """`[T]`"""

    def __getitem__(self, tokens: slice) -> Routing:
        return Routing(self.experts[tokens], self.known[tokens])


def joined(parts: Sequence[tuple[int, Routing | None]]) -> Routing | None:
    """The routing of parts that follow each other, each with its number of tokens."""
    some = next((routing for _, routing in parts if routing is not None), None)
    if some is None:
        return None
    whole = [_unknown(tokens, some.experts) if part is None else part for tokens, part in parts]
    return Routing(
        np.concatenate([part.experts for part in whole]),
        np.concatenate([part.known for part in whole]),
    )


def routing_of(turns: Sequence[Turn]) -> list[Routing | None]:
    """For each turn, the routing of the tokens that it adds, its prompt's and its answer's; None
    where no token of them has any.

    Raises:
        ProxyError: the turns have rows of several models.
    """
    first = next((t.routed_experts for t in turns if t.routed_experts is not None), None)
    if first is None:
        return [None] * len(turns)
    found: list[Routing | None] = [None] * len(turns)
    for own in (True, False):
        for index, turn in enumerate(turns):
            rows = turn.routed_experts
            if rows is None:
                continue
            if rows.shape[1:] != first.shape[1:]:
                raise ProxyError(
                    f"session {turn.session_id!r} turn {index}: its routed experts have the shape "
                    f"{list(rows.shape[1:])}, and others have {list(first.shape[1:])}; record the "
                    "calls of several models in several sessions"
                )
            _spread(turns, index, rows, found, own=own)
    return found


def routing_along(
    turns: Sequence[Turn], found: Sequence[Routing | None], chain: Sequence[int]
) -> Routing | None:
    """The routing `[T]` of the whole path to the last turn of `chain`, which holds the indices of
    the path's turns from the root; `found` is `routing_of` the turns."""
    parts: list[tuple[int, Routing | None]] = []
    stop = turns[chain[-1]].path_tokens
    for index in reversed(chain):
        begin = turns[index].shared_tokens
        if begin < stop:
            routing = found[index]
            parts.append((stop - begin, None if routing is None else routing[: stop - begin]))
            stop = begin
    return joined(parts[::-1])


def _spread(
    turns: Sequence[Turn],
    index: int,
    rows: RoutedExperts,
    found: list[Routing | None],
    *,
    own: bool,
) -> None:
    """Enters a turn's rows for its `own` tokens, or for those before them that lack rows."""
    stop = turns[index].path_tokens - 1
    start = stop - len(rows)
    at: int | None = index
    while at is not None and start < stop:
        begin = turns[at].shared_tokens  # the path's tokens from here to `stop` are the turn's
        low = max(start, begin)
        if low < stop and own == (at == index):
            _fill(
                turns, at, slice(low - begin, stop - begin), rows[low - start : stop - start], found
            )
        if own:
            return
        stop, at = min(stop, begin), turns[at].parent


def _fill(
    turns: Sequence[Turn],
    index: int,
    tokens: slice,
    rows: RoutedExperts,
    found: list[Routing | None],
) -> None:
    turn = turns[index]
    routing = found[index]
    if routing is None:
        added = len(turn.prompt_ids) + len(turn.sampled_ids)
        routing = found[index] = _unknown(added, rows)
    missing = ~routing.known[tokens]
    routing.experts[tokens][missing] = rows[missing]
    routing.known[tokens] = True


def _unknown(tokens: int, like: RoutedExperts) -> Routing:
    return Routing(np.zeros((tokens, *like.shape[1:]), like.dtype), np.zeros(tokens, np.bool_))
