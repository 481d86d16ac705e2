"""Sampled ids → the message, once the answer is complete.

Invariant: as with `AnswerParser`, the deltas that `finish` returns equal its message.
"""

from __future__ import annotations

from proxy.rendering.deltas import Delta
from proxy.rendering.prefix_stream import PrefixParser


class WholeParser(PrefixParser):
    """Parses one answer at its end, so `finish` returns all deltas, and it never asks to end
    sampling."""

    def feed(self, ids: list[int]) -> list[Delta]:
        self._ids += ids
        return []
