"""What the last calls of each session said, so that the next is charged only for what it adds.

An agent sends its whole history with every call. Its items are compared with those of the calls
before, and what they were parsed to and their keys are taken over as far as they are the same.
Invariant: a call is parsed and keyed as it would be without this. It is a cache: at most
`limit_bytes` of requests, the session that was quiet longest forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import orjson

from proxy.conversation import KnownKeys

T = TypeVar("T")

LIMIT_BYTES = 256 * 2**20
PER_SESSION = 4
"""An agent and some sub-agents that take turns."""
MIN_BYTES = 4096
"""A smaller request is parsed sooner than it is compared."""
_PLAIN_DEPTH = 6


@dataclass(slots=True)
class Said:
    """The items of one request, with what each was parsed to."""

    items: list[Any]
    parsed: list[Any]
    parser: Callable[..., Any]
    numbers: list[int]
    """Indexes of items that hold numbers or booleans: Python has 1 == 1.0 == True."""
    body_bytes: int
    keys: KnownKeys = field(default_factory=KnownKeys)

    def common(self, items: Sequence[Any]) -> int:
        """How many items two requests begin with in common."""
        size = min(len(self.items), len(items))
        try:
            if self.items[:size] != items[:size]:
                pairs = enumerate(zip(self.items, items, strict=False))
                size = next(i for i, (mine, other) in pairs if mine != other)
        except RecursionError:  # JSON that is nested deeper than Python compares
            return 0
        for index in self.numbers:
            if index >= size:
                break
            if orjson.dumps(self.items[index]) != orjson.dumps(items[index]):
                return index
        return size


class Recent:
    """By session, the requests that are continued."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._body_bytes = 0
        self._said: OrderedDict[Hashable, list[Said]] = OrderedDict()

    def __len__(self) -> int:
        """Bytes of the requests that are remembered."""
        return self._body_bytes

    def parsed(
        self,
        session: Hashable,
        items: list[Any],
        parser: Callable[..., T],
        parse: Callable[[int], T],
        body_bytes: int,
    ) -> tuple[list[T], KnownKeys]:
        """`parse(i)` of every item, and the keys of the conversation that they continue.

        `parser` names what `parse` does: what was parsed otherwise is of no use.
        """
        known = self._said.setdefault(session, [])
        self._said.move_to_end(session)
        best, size = None, 0
        for said in known:
            common = said.common(items) if said.parser is parser else 0
            if common > size:
                best, size = said, common
        start, shared = ([], []) if best is None else (best.items[:size], best.parsed[:size])
        added = [parse(index) for index in range(size, len(items))]
        now = Said([*start, *items[size:]], [*shared, *added], parser, [], body_bytes)
        old = [] if best is None else [index for index in best.numbers if index < size]
        new = (i for i in range(size, len(items)) if not _is_plain(items[i], _PLAIN_DEPTH))
        now.numbers = [*old, *new]
        if best is not None:
            now.keys = best.keys.copy()
        self._keep(known, best if best is not None and 2 * size >= len(best.items) else None, now)
        return list(now.parsed), now.keys

    def _keep(self, known: list[Said], continued: Said | None, now: Said) -> None:
        if continued is None and len(known) >= PER_SESSION:
            continued = known[0]
        if continued is not None:
            known.remove(continued)
            self._body_bytes -= continued.body_bytes
        known.append(now)
        self._body_bytes += now.body_bytes
        while self._body_bytes > self._limit_bytes:
            _, oldest = self._said.popitem(last=False)
            self._body_bytes -= sum(said.body_bytes for said in oldest)


def _is_plain(value: Any, depth: int) -> bool:
    """Whether it is text all through, down to a depth at which we stop looking."""
    if value is None or isinstance(value, str):
        return True
    if isinstance(value, dict):
        return depth > 0 and all(_is_plain(inner, depth - 1) for inner in value.values())
    if isinstance(value, list):
        return depth > 0 and all(_is_plain(inner, depth - 1) for inner in value)
    return False
