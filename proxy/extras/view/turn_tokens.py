"""A turn token by token: ids and text, and for sampled ones probability, version, mask, and the
recorded alternatives.

Invariant: the texts of the tokens, joined, are the text that the model saw and wrote. Where several
tokens are one character, the first of them has it. The tokens of an image have no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile

import numpy as np

from proxy.extras.secrets.session import HIDDEN
from proxy.extras.view.answers import AlternativesJson, TokensPage
from proxy.records import Alternatives, Ids, ImageSpan, Logprobs, Turn, TurnStatus
from proxy.records.images import decoded, moved, within
from proxy.rendering.tokenizer import Tokenizer

MAX_TOKENS = 4_000
"""Tokens of one page."""
_MAX_JOINED = 8
"""Tokens that one character may have."""
_UNFINISHED = "�"
HIDDEN_TEXT = "•"
"""What is shown for a token of a secret."""


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Tokens `[start, end)` of a path that one turn added."""

    start: int
    end: int
    turn: int
    sampled: bool
    trained: bool
    """Whether a trainer may use them: sampled in a turn that is DONE."""
    version: int | None


@dataclass(frozen=True, slots=True)
class TurnTokens:
    """All tokens on a turn's path, `[T]`."""

    ids: Ids
    """Below 0 for tokens of `images`."""
    logprobs: Logprobs
    """NaN for tokens of a prompt."""
    spans: list[TokenSpan]
    prompt_tokens: int
    """Number of tokens that the engine was given for this turn."""
    shared_tokens: int
    alternatives: list[tuple[int, Alternatives]]
    """For each turn that recorded some: where its answer begins, and their rows."""
    images: tuple[ImageSpan, ...] = ()

    def page(self, start: int, count: int, tokenizer: Tokenizer | None) -> TokensPage:
        """The tokens `[start, start + count)` as JSON, with the spans that they are in."""
        end = min(len(self.ids), start + min(count, MAX_TOKENS))
        images = [each for each in self.images if each.offset < end and _end(each) > start]
        ids = self.ids[start:end].tolist()
        for image in images:
            own = range(max(start, image.offset), min(end, _end(image)))
            ids[own.start - start : own.stop - start] = [image.token] * len(own)
        # One more on each side, because a character may begin before the page.
        first, last = max(0, start - _MAX_JOINED), min(len(self.ids), end + _MAX_JOINED)
        texts = pieces(self.ids[first:last].tolist(), tokenizer) if tokenizer else None
        page: TokensPage = {
            "start": start,
            "total": len(self.ids),
            "prompt_tokens": self.prompt_tokens,
            "shared_tokens": self.shared_tokens,
            "ids": ids,
            "texts": texts[start - first :][: len(ids)] if texts is not None else None,
            "logprobs": [
                None if np.isnan(value) else round(float(value), 5)
                for value in self.logprobs[start:end]
            ],
            "spans": [
                (s.start, s.end, s.turn, s.sampled, s.trained, s.version)
                for s in self.spans
                if s.start < end and s.end > start
            ],
        }
        if images:
            page["images"] = [(each.offset, _end(each), each.sha256) for each in images]
        return page

    def alternatives_page(
        self, start: int, end: int, tokenizer: Tokenizer | None
    ) -> AlternativesJson | None:
        """Those of the tokens `[start, end)` of a page; None if none of them has any."""
        ids: list[list[int]] = [[] for _ in range(start, end)]
        logprobs: list[list[float]] = [[] for _ in range(start, end)]
        for begin, rows in self.alternatives:
            first = max(start, begin)
            for at, row in enumerate(rows[first - begin : max(0, end - begin)], first - start):
                known = row[row["logprob"] != -np.inf]
                ids[at] = known["id"].tolist()
                logprobs[at] = [round(value, 5) for value in known["logprob"].tolist()]
        different = {each for row in ids for each in row}
        if not different:
            return None
        texts = {str(each): _text([each], tokenizer) for each in different} if tokenizer else None
        return {"ids": ids, "logprobs": logprobs, "texts": texts}


def turn_tokens(path: Sequence[Turn]) -> TurnTokens:
    """`path`: the turns on the path of the last one, from the root."""
    turn = path[-1]
    total = turn.path_tokens
    logprobs = np.full(total, np.nan, np.float32)
    parts: list[Ids] = []
    spans: list[TokenSpan] = []
    alternatives: list[tuple[int, Alternatives]] = []
    images: list[ImageSpan] = []
    ends = [after.shared_tokens for _, after in pairwise(path)] + [total]
    for each, end in zip(path, ends, strict=True):
        own = np.concatenate([each.prompt_ids, each.sampled_ids])
        start, prompt_end = each.shared_tokens, min(end, each.prompt_tokens)
        parts.append(own[: end - start])
        images += moved(within(each.images, 0, end - start), start)
        if prompt_end > start:
            spans.append(TokenSpan(start, prompt_end, each.index, False, False, None))
        if end > each.prompt_tokens:
            logprobs[each.prompt_tokens : end] = each.logprobs[: end - each.prompt_tokens]
            spans += _sampled(each, end)
            if each.alternatives is not None:
                rows = each.alternatives[: end - each.prompt_tokens]
                alternatives.append((each.prompt_tokens, rows))
    return TurnTokens(
        np.concatenate(parts),
        logprobs,
        spans,
        turn.prompt_tokens,
        turn.shared_tokens,
        alternatives,
        tuple(images),
    )


def _end(image: ImageSpan) -> int:
    return image.offset + image.tokens


def _sampled(turn: Turn, end: int) -> list[TokenSpan]:
    trained, start = turn.status is TurnStatus.DONE, turn.prompt_tokens
    if not turn.versions:
        return [TokenSpan(start, end, turn.index, True, trained, None)]
    return [
        TokenSpan(
            start + each.start, min(end, start + each.end), turn.index, True, trained, each.version
        )
        for each in turn.versions
        if start + each.start < end
    ]


def pieces(ids: list[int], tokenizer: Tokenizer) -> list[str]:
    """The text of each token; empty for one whose character an earlier token has, and for one of an
    image, whose id is below HIDDEN."""
    texts: list[str] = []
    while len(texts) < len(ids):
        at = len(texts)
        own = list(takewhile(lambda token: token >= HIDDEN, ids[at : at + _MAX_JOINED]))
        size, text = _character(own, tokenizer) if own else (1, "")
        texts += [text, *[""] * (size - 1)]
    return texts


def shown_text(ids: Ids, tokenizer: Tokenizer) -> str:
    """The text of ids, with a word for each image."""
    return decoded(ids, lambda own: "".join(pieces(own, tokenizer)), hidden=HIDDEN)


def _character(ids: list[int], tokenizer: Tokenizer) -> tuple[int, str]:
    """The number of the first tokens that end with a whole character, and their text. Bytes that
    are no character are shown as one replacement character, as in the whole text."""
    unfinished = 1, _text(ids[:1], tokenizer)
    before_hidden = ids.index(HIDDEN) if HIDDEN in ids[1:] and ids[0] != HIDDEN else len(ids)
    for size in range(1, before_hidden + 1):
        text = _text(ids[:size], tokenizer)
        if not text.endswith(_UNFINISHED):
            return size, text
        if text == _UNFINISHED:
            unfinished = size, text
    return unfinished


def _text(ids: list[int], tokenizer: Tokenizer) -> str:
    if HIDDEN in ids:
        return HIDDEN_TEXT if len(ids) == 1 else tokenizer.decode([i for i in ids if i != HIDDEN])
    if len(ids) == 1:
        piece = tokenizer.fast.id_to_token(ids[0])
        if piece is None:
            return f"⟨{ids[0]}⟩"
        if "\u2581" in piece:  # SentencePiece's space, which `decode` drops at the beginning
            return str(piece).replace("\u2581", " ")
    return tokenizer.decode(ids)
