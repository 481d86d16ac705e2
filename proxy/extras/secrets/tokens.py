"""Which tokens spell a secret."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt

from proxy.extras.secrets.found import Secret, markers
from proxy.extras.secrets.memory import Known

Decode = Callable[[list[int]], str]
"""Ids → text, with special tokens."""
Marked = npt.NDArray[np.bool_]

_BEFORE = 4
"""Tokens that are decoded with each one, so that blanks and characters of several tokens come out
as in the whole text."""
_UNFINISHED = "\ufffd"


def untrained(ids: Sequence[int], decode: Decode, known: Known | None = None) -> Marked:
    """`[T]`: True for each token with a character of a secret of the text that the ids spell, or of
    one that is `known`, to which the secrets of this text are added. Give the whole path of a
    conversation, prompt and answers, so that a secret is found that begins in one turn and ends in
    the next one, or that was in the prompt and is repeated in an answer."""
    known = Known() if known is None else known
    decode = apart_from_images(decode)
    known.learn(decode(list(ids)))
    return spelling(list(ids), decode, known)


def apart_from_images(decode: Decode) -> Decode:
    """Decodes ids of images, too, which are below 0: a line break for those of one image."""

    def text(ids: list[int]) -> str:
        if min(ids, default=0) >= 0:
            return decode(ids)
        runs = groupby(ids, lambda token: token < 0)
        return "".join("\n" if is_image else decode(list(run)) for is_image, run in runs)

    return text


def spelling(ids: list[int], decode: Decode, known: Known) -> Marked:
    """The same, without adding to `known`. The markers of a text that was exported without its
    secrets count as secrets: nobody said them."""

    def found(text: str) -> list[Secret]:
        return [*known.find(text), *markers(text)]

    if not ids or not found(decode(ids)):
        return np.zeros(len(ids), np.bool_)
    texts = pieces(ids, decode)
    return marked(texts, found("".join(texts))) & (np.array(ids) >= 0)


def pieces(ids: Sequence[int], decode: Decode) -> list[str]:
    """The text that each token adds. Of several tokens that are one character, the last has it."""
    texts: list[str] = []
    for at in range(len(ids)):
        first = max(0, at - _BEFORE)
        before = decode(list(ids[first:at])).rstrip(_UNFINISHED) if at > first else ""
        now = decode(list(ids[first : at + 1])).rstrip(_UNFINISHED)
        texts.append(now[len(before) :])
    return texts


def marked(texts: Sequence[str], secrets: Iterable[Secret]) -> Marked:
    """`[T]`: the tokens with these texts that touch a secret of the joined text. A token that is a
    part of a character counts if it stands in a secret or beside one."""
    lengths = np.array([len(text) for text in texts], np.int64)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    found = np.zeros(len(texts), np.bool_)
    for secret in secrets:
        found |= (starts < secret.end) & (ends > secret.start)
        found |= (lengths == 0) & (starts >= secret.start) & (starts <= secret.end)
    return found
