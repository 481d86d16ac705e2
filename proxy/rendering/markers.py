"""Finds the marker tokens of families whose answers can be parsed token by token.

In these families single tokens separate the reasoning, the text and the tool calls. The answers of
all others are parsed repeatedly as they grow (`prefix_stream`).
"""

from __future__ import annotations

from dataclasses import dataclass

from proxy.rendering.families import Family
from proxy.rendering.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Markers:
    """Ids of the tokens that open and close the reasoning and a tool call."""

    think: int
    end_think: int
    tool: int
    end_tool: int

    @property
    def all(self) -> frozenset[int]:
        """The four ids."""
        return frozenset((self.think, self.end_think, self.tool, self.end_tool))


def find_markers(family: Family, tokenizer: Tokenizer) -> Markers | None:
    """The markers; None if the family has none, or if one of them is not a single token."""
    found = [tokenizer.fast.token_to_id(name) for name in family.separators or ()]
    known = [token for token in found if token is not None]
    return Markers(*known) if len(known) == len(Markers.__slots__) else None
