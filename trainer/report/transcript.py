"""A recorded session as text: exactly the tokens that the engine saw, with sampled ones marked.

Invariant: the concatenated pieces of a branch are the decoded path of its last turn. The text is
decoded from the engine's tokens only, never copied from the agent's requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from proxy.records import Ids, Turn


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Example: TextPiece("The answer is 42.", sampled=True)"""

    text: str
    sampled: bool


def longest_branch(turns: Sequence[Turn]) -> list[tuple[Ids, bool]]:
    """The longest path of the session, as runs of token ids with a flag for sampled ones."""
    if not turns:
        return []
    by_index = {turn.index: turn for turn in turns}
    last = max(turns, key=lambda turn: (turn.path_tokens, turn.index))
    chain = [last]
    while (parent := chain[-1].parent) is not None:
        chain.append(by_index[parent])
    ids, sampled = np.zeros(0, np.int32), np.zeros(0, np.bool_)
    for turn in reversed(chain):
        new = np.concatenate([turn.prompt_ids, turn.sampled_ids])
        mark = np.arange(len(new)) >= len(turn.prompt_ids)
        ids = np.concatenate([ids[: turn.shared_tokens], new])
        sampled = np.concatenate([sampled[: turn.shared_tokens], mark])
    edges = [0, *(np.flatnonzero(np.diff(sampled)) + 1).tolist(), len(ids)]
    return [(ids[start:end], bool(sampled[start])) for start, end in pairwise(edges) if end > start]


def transcript(turns: Sequence[Turn], model: Path) -> list[TextPiece]:
    """The longest branch, decoded with the checkpoint's tokenizer; empty without a tokenizer."""
    file = model / "tokenizer.json"
    if not file.is_file():
        return []
    tokenizer = Tokenizer.from_file(str(file))
    return [
        TextPiece(tokenizer.decode(run.tolist(), skip_special_tokens=False), sampled)
        for run, sampled in longest_branch(turns)
    ]
