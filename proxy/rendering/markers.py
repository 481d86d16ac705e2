"""Families whose answers can be read token by token: single tokens separate their channels."""

from __future__ import annotations

from dataclasses import dataclass

from proxy.rendering.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Markers:
    think: int
    end_think: int
    tool: int
    end_tool: int

    @property
    def all(self) -> frozenset[int]:
        return frozenset((self.think, self.end_think, self.tool, self.end_tool))


_SEPARATED = {"qwen3": ("<think>", "</think>", "<tool_call>", "</tool_call>")}
"""Their parsers trim white space around text and reasoning, and end the text at the first tool
call. The others' answers are parsed again as they grow (`prefix_stream`)."""


def find_markers(family: str, tokenizer: Tokenizer) -> Markers | None:
    """None where the family has none, or the vocabulary writes them in several tokens."""
    found = [tokenizer.fast.token_to_id(name) for name in _SEPARATED.get(family, ())]
    known = [token for token in found if token is not None]
    return Markers(*known) if len(known) == len(Markers.__slots__) else None
