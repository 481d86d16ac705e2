"""The most probable tokens at each sampled position, as they are collected, sent and stored.

In memory they are one array (`proxy.records.Alternatives`). Relays, stores and records keep its
bytes after the number of columns. Invariant: `load(dump(rows))` equals `rows`, and each alternative
takes 8 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from operator import itemgetter

import numpy as np

from proxy.records import ALTERNATIVE, Alternatives

MAX_ALTERNATIVES = 20
"""Per token. The limit of a vLLM without `--max-logprobs`."""
NONE = (-1, -np.inf)
"""Fills the rest of a row for which the engine reported fewer tokens."""
_HEADER_BYTES = 4
_logprob = itemgetter(1)

Reported = Sequence[Sequence[tuple[int, float]]]
"""What an engine reports for each sampled token: ids and log-probabilities, in any order."""


def table(reported: Reported, columns: int) -> Alternatives:
    """The `columns` most probable tokens at each position. Tokens of probability 0, which the
    sampling parameters exclude, are left out.

    Raises ValueError: a number is too large.
    """
    rows = []
    try:
        for tokens in reported:
            possible = [each for each in tokens if exp(each[1]) != 0]
            best = sorted(possible, key=_logprob, reverse=True)[:columns]
            rows.append(best + [NONE] * (columns - len(best)))
        return np.array(rows, ALTERNATIVE).reshape(len(rows), columns)
    except OverflowError as error:
        raise ValueError(f"an alternative with a number that is too large: {error}") from error


def dump(rows: Alternatives | None) -> bytes | None:
    """`rows` as bytes; None stays None."""
    if rows is None:
        return None
    columns: int = rows.shape[1]
    return columns.to_bytes(_HEADER_BYTES, "little") + rows.tobytes()


def load(data: bytes | None) -> Alternatives | None:
    """The rows of bytes that `dump` returned: a read-only view of them. Raises ValueError."""
    if data is None:
        return None
    columns = int.from_bytes(data[:_HEADER_BYTES], "little")
    size = len(data) - _HEADER_BYTES
    if size < 0 or not columns or size % (columns * ALTERNATIVE.itemsize):
        raise ValueError(f"{len(data)} bytes are not rows of {columns} alternatives")
    return np.frombuffer(data, ALTERNATIVE, offset=_HEADER_BYTES).reshape(-1, columns)


class CollectedAlternatives:
    """The alternatives of one answer while it is sampled, `columns` for each token."""

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._bytes = bytearray()
        self._reported = False

    def add(self, tokens: int, rows: Alternatives | None) -> None:
        """Appends those of the next `tokens` tokens. None: the engine did not report them."""
        if rows is None:
            rows = table([()] * tokens, self._columns)
        else:
            self._reported = True
        self._bytes += rows.tobytes()

    def rows(self) -> Alternatives | None:
        """Those of all tokens so far; None if no engine reported any."""
        if not self._reported:
            return None
        return np.frombuffer(bytes(self._bytes), ALTERNATIVE).reshape(-1, self._columns)
