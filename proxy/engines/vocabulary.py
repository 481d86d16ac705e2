"""Whether an engine has the vocabulary of the proxy's model.

The proxy sends and records token ids. An engine of another model takes them for other words, and
answers, so that nothing but the agents' success would show it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

WORDS = 64
_LOOKED_AT = 1024
"""Ids among which words are looked for, spread over the vocabulary."""


@dataclass(frozen=True, slots=True)
class KnownWords:
    """Ids of plain words, which every way of decoding writes alike, and their text without blanks.

    Example: KnownWords((291, 1830), "thereturn")
    """

    ids: tuple[int, ...]
    text: str

    @classmethod
    def of(cls, tokenizer: Any) -> Self:
        """Up to `WORDS` of them, spread over the vocabulary of `tokenizer`."""
        found = {}
        for number in range(0, len(tokenizer), max(1, len(tokenizer) // _LOOKED_AT)):
            word = tokenizer.decode([number]).strip()
            if len(word) > 1 and word.isascii() and word.isalpha():
                found[number] = word
        every = max(1, len(found) // WORDS)
        chosen = dict(list(found.items())[::every][:WORDS])
        return cls(tuple(chosen), "".join(chosen.values()))

    def difference(self, said: str) -> str | None:
        """How the engine's text of the ids differs, for an error; None if it is equal."""
        theirs = "".join(said.split())
        if theirs == self.text:
            return None
        pairs = zip(theirs, self.text, strict=False)
        at = next((n for n, (its, ours) in enumerate(pairs) if its != ours), 0)
        here = slice(max(0, at - 10), at + 20)
        return f"it reads …{theirs[here]}… where the proxy's model has …{self.text[here]}…"
