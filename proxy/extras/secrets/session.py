"""The secrets of one session: found in its texts and tokens, masked in all of its turns.

Invariant: a secret that any of the added turns has is masked in each of them, in texts and tokens.
A turn that is masked is a copy: the record stays as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
from msgspec.structs import replace as replaced

from proxy.extras.secrets.found import Within, within
from proxy.extras.secrets.kinds import field_kind
from proxy.extras.secrets.memory import Known
from proxy.extras.secrets.tokens import Decode, Marked, apart_from_images, spelling
from proxy.records import Ids, Mark, Session, Turn

HIDDEN = -1
"""The id of a masked token where people look."""
EDGE_CHARS = 4
"""A token may be a part of a character, so that a text of tokens may end within one."""
CONTEXT_TOKENS = 256
"""Tokens before those of a turn that are read with them, because a secret may begin there."""


class SessionSecrets:
    """Example:
    secrets = SessionSecrets(tokenizer.decode)
    secrets.add(turns)
    [secrets.masked(turn) for turn in turns]
    """

    def __init__(
        self, decode: Decode | None, within: Within = within, known: Known | None = None
    ) -> None:
        """Without `decode`, all ids of a session with a secret are masked, because nobody knows
        which ones spell it. `known`: secrets that several sessions share."""
        self.known = Known(within) if known is None else known
        self._decode = None if decode is None else apart_from_images(decode)
        self._own: dict[int, tuple[int | None, int, Ids]] = {}
        """Turn → its parent, its shared tokens, and the ids that it adds."""
        self._begun: dict[int, Marked] = {}
        """Tokens of a turn with the beginning of a secret that a later turn ends."""
        self._found: dict[int, Marked] = {}
        """Tokens of a turn that spell a secret, of the turns that were asked for."""
        self._settled = 0
        """Number of secrets that were known when these two were made."""

    def add(self, turns: Sequence[Turn]) -> None:
        """Reads turns, parents before their children. A turn may be added again."""
        for turn in turns:
            for recorded in (turn.request, turn.answer):
                if recorded:
                    for text in _texts(orjson.loads(recorded)):
                        self.known.learn(text)
            own = np.concatenate([turn.prompt_ids, turn.sampled_ids])
            self._own[turn.index] = (turn.parent, turn.shared_tokens, own)
            if self._decode is not None:
                # The prompt's own text is that of the request, which was read.
                new = own[len(turn.prompt_ids) :] if turn.request else own
                before, _ = self._context(turn.index)
                tail = turn.prompt_ids[-CONTEXT_TOKENS:].tolist() if turn.request else []
                self.known.learn(self._decode([*before, *tail, *new.tolist()]))
        self._settled = -1

    def add_session(self, session: Session) -> None:
        """Reads what a session has besides its turns: its metadata, and a branch's own texts."""
        origin = session.origin
        own = [session.metadata, *(() if origin is None else (origin.system, origin.answer))]
        for text in _texts(own):
            self.known.learn(text)
        for name, value in session.metadata.items():
            kind = field_kind(name, value) if isinstance(value, str) else None
            if kind is not None:
                self.known.add(value, kind)

    def of(self, index: int) -> Marked:
        """`[P + S]`: which of the ids that a turn adds spell a secret; none of an image's."""
        own = self._own[index][2]
        if self._decode is None:
            return (own >= 0) & (len(self.known) > 0)
        self._settle()
        if index not in self._found:
            before, _ = self._context(index)
            found = self._marked([*before, *own.tolist()])[len(before) :]
            self._found[index] = found & (own >= 0)
        found = self._found[index]
        return found | self._begun[index] if index in self._begun else found

    def along(self, path: Sequence[int]) -> Marked:
        """`[T]` for the path of turns, from its root to its last turn."""
        parts = [self.of(index) for index in path]
        ends = [self._own[after][1] for after in path[1:]]
        starts = [self._own[index][1] for index in path]
        cut = [part[: end - start] for part, start, end in zip(parts, starts, ends, strict=False)]
        return np.concatenate([*cut, parts[-1]]) if parts else np.zeros(0, np.bool_)

    def of_pieces(self, pieces: Sequence[Ids]) -> list[Marked]:
        """The same for pieces of a session's tokens, which say only from which turn each token is:
        `[T]` for each. The tokens of a turn stand in order, from its first one on."""
        read: Counter[int] = Counter()
        found = []
        for turns in pieces:
            is_secret = np.zeros(len(turns), np.bool_)
            for turn in np.unique(turns).tolist():
                own = turns == turn
                size = int(own.sum())
                is_secret[own] = self.of(turn)[read[turn] : read[turn] + size]
                read[turn] += size
            found.append(is_secret)
        return found

    def masked(self, turn: Turn, hidden: int = HIDDEN) -> Turn:
        """The turn with markers in its texts, and `hidden` as the id of masked tokens."""
        where = self.of(turn.index)
        prompt, sampled = where[: len(turn.prompt_ids)], where[len(turn.prompt_ids) :]
        alternatives = turn.alternatives
        if alternatives is not None and sampled.any():
            alternatives = alternatives.copy()
            alternatives["id"][sampled] = -1
            alternatives["logprob"][sampled] = -np.inf
        return replaced(
            turn,
            request=self.mask_json(turn.request),
            answer=self.mask_json(turn.answer),
            sampling=self.mask_value(turn.sampling),
            prompt_ids=np.where(prompt, np.int32(hidden), turn.prompt_ids),
            sampled_ids=np.where(sampled, np.int32(hidden), turn.sampled_ids),
            alternatives=alternatives,
        )

    def masked_session(self, session: Session) -> Session:
        """The session with markers in its metadata, in what its rules found, and in the texts of a
        branch."""
        metadata, origin = self.mask_value(session.metadata), session.origin
        if origin is not None:
            own = {"system": origin.system, "answer": origin.answer}
            origin = replace(origin, **self.mask_value(own))
        marks = self.mask_marks(session.marks)
        return replace(session, metadata=metadata, marks=marks, origin=origin)

    def mask_marks(self, marks: Sequence[Mark]) -> list[Mark]:
        """The marks with what they found masked, which is the beginning of a longer text."""
        return [replace(mark, found=self.known.mask_piece(mark.found)) for mark in marks]

    def mask_json(self, recorded: bytes) -> bytes:
        """The JSON with markers in its strings; the same bytes if nothing is masked."""
        if not recorded:
            return recorded
        value = orjson.loads(recorded)
        masked = self.mask_value(value)
        return recorded if masked == value else orjson.dumps(masked)

    def mask_value(self, value: Any) -> Any:
        """The value of JSON with markers in its strings, at any depth."""
        return self.known.mask_value(value)

    def _settle(self) -> None:
        """Finds the secrets that begin in one turn and end in another."""
        if self._settled == len(self.known):
            return
        self._settled, self._begun, self._found = len(self.known), {}, {}
        for index in self._own:
            before, places = self._context(index)
            own = self._own[index][2][:CONTEXT_TOKENS].tolist()
            if not self._crosses(before, own):
                continue
            found = self._marked([*before, *own])[: len(before)]
            for (turn, at), is_secret in zip(places, found, strict=True):
                if is_secret:
                    size = len(self._own[turn][2])
                    self._begun.setdefault(turn, np.zeros(size, np.bool_))[at] = True

    def _crosses(self, before: list[int], own: list[int]) -> bool:
        """Whether a secret may begin in the one and end in the other."""
        if not before or not own or self._decode is None:
            return False
        at = len(self._decode(before))
        found = self.known.find(self._decode([*before, *own]))
        return any(each.start < at + EDGE_CHARS and each.end > at - EDGE_CHARS for each in found)

    def _marked(self, ids: list[int]) -> Marked:
        assert self._decode is not None
        return spelling(ids, self._decode, self.known)

    def _context(self, index: int) -> tuple[list[int], list[tuple[int, int]]]:
        """The last ids before those that a turn adds, and the turn and the place that each has."""
        ids: list[int] = []
        places: list[tuple[int, int]] = []
        parent, end, _ = self._own[index]
        while parent is not None and parent in self._own and len(ids) < CONTEXT_TOKENS:
            before, start, own = self._own[parent]
            first = max(0, end - start - CONTEXT_TOKENS + len(ids))
            part = own[first : max(0, end - start)].tolist()
            ids = [*part, *ids]
            places = [*((parent, first + at) for at in range(len(part))), *places]
            parent, end = before, min(end, start)
        return ids, places


def _texts(value: Any) -> Iterator[str]:
    """The strings of JSON; a field with the name of a secret as it is written in JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, dict):
        for name, each in value.items():
            if isinstance(each, str) and field_kind(name, each):
                yield orjson.dumps({name: each}).decode()
            yield from _texts(each)
