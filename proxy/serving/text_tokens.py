"""The tokens of an answer's text, for agents that request log-probabilities.

An answer's ids hold reasoning, markers, calls and an end-of-turn token beside the text that the
agent gets. Invariant: the texts of the tokens, joined, are the text; a token that is partly white
space or a stop string that was left out has only the rest. Where a character takes several tokens,
the last of them has it, and the others are empty. `reasoning_tokens` counts those that usage names.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

from proxy.engines.protocol import Chunk
from proxy.rendering.deltas import Delta, ReasoningDelta, TextDelta
from proxy.rendering.tokenizer import Tokenizer
from proxy.wire.dialect import SampledToken

_NAMES_FOLLOW = ("channel", "start")
"""After a marker with such a name comes the name of a channel or role, which is not text."""
_PROBE_CHARS = 16


class TextTokens:
    """Follows one answer: `feed` for each chunk with the deltas that it led to, then `end`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = tokenizer.fast.get_added_tokens_decoder()
        self._stream = DecodeStream(skip_special_tokens=False)
        self._scored: list[tuple[float, list[tuple[int, float]]]] = []
        """Log-probability and alternatives of each token."""
        self._sampled = ""
        """The text of all tokens."""
        self._begins: list[int] = []
        """Where each token begins in it."""
        self._openings = [0]
        """Where text may begin in it: after the markers."""
        self._reasoning = ""
        """The reasoning that was sent."""
        self._at: int | None = None
        """Where the text that was sent ends; None before the first."""
        self._shown: dict[int, str] = {}
        """The part of each token in the text; those that were passed on are taken out."""

    def feed(self, chunk: Chunk, deltas: Sequence[Delta]) -> list[SampledToken]:
        """The tokens whose text is complete."""
        tops = chunk.top_logprobs or [[] for _ in chunk.ids]
        for token, logprob, top in zip(chunk.ids, chunk.logprobs, tops, strict=True):
            self._begins.append(len(self._sampled))
            self._sampled += self._stream.step(self._tokenizer.fast, token) or ""
            self._scored.append((logprob, top))
            marker = self._added.get(token)
            if marker is not None and not any(name in marker.content for name in _NAMES_FOLLOW):
                self._openings.append(len(self._sampled))
        return self.sent(deltas)

    def sent(self, deltas: Sequence[Delta]) -> list[SampledToken]:
        """The same, for deltas of chunks that were fed before."""
        out: list[SampledToken] = []
        for delta in deltas:
            if isinstance(delta, TextDelta):
                self._take(delta.text)
            elif isinstance(delta, ReasoningDelta):
                self._reasoning += delta.text
            else:
                out += self.end()
        return out + self._passed_on(whole=True)

    def end(self) -> list[SampledToken]:
        """The remaining tokens, because no text follows."""
        return self._passed_on(whole=False)

    def _take(self, text: str) -> None:
        if self._at is None:
            self._at = self._opening(text)
        while text and self._at is not None:
            size = _common(self._sampled, self._at, text)
            if not size:  # parts of a text are joined by a line break that was not sampled
                text = text.lstrip("\n")
                found = self._sampled.find(text.partition("\n")[0], self._at) if text else -1
                if found < 0:
                    return
                self._at = found
                continue
            self._show(self._at, self._at + size)
            self._at += size
            text = text[size:]

    def _opening(self, text: str) -> int | None:
        """Where the text begins; None if it is not what was sampled."""
        after = max(self._sampled.find(self._reasoning), 0) + len(self._reasoning)
        probe = text[:_PROBE_CHARS]
        for opening in self._openings:
            if opening < after:
                continue
            rest = self._sampled[opening : opening + len(probe) + _PROBE_CHARS]
            blank = len(rest) - len(rest.lstrip())
            for begin in (opening, opening + blank):
                if self._sampled.startswith(probe, begin):
                    return begin
        found = self._sampled.find(probe, after)
        return None if found < 0 else found

    def _show(self, begin: int, end: int) -> None:
        first = max(bisect_right(self._begins, begin) - 1, 0)
        while first > 0 and self._begins[first - 1] == begin:
            first -= 1  # tokens that are a part of the first character
        for index in range(first, bisect_right(self._begins, end - 1)):
            stop = self._end_of(index)
            part = self._sampled[max(begin, self._begins[index]) : min(end, stop)]
            if part or self._begins[index] == stop:
                self._shown[index] = self._shown.get(index, "") + part

    def _passed_on(self, *, whole: bool) -> list[SampledToken]:
        """Takes out the tokens of the text that was sent; if `whole`, only those that end in it."""
        out: list[SampledToken] = []
        for index in sorted(self._shown):
            if whole and self._end_of(index) > (self._at or 0):
                break
            logprob, top = self._scored[index]
            alternatives = tuple((self._tokenizer.decode([i]), value) for i, value in top)
            out.append(SampledToken(self._shown.pop(index), logprob, alternatives))
        return out

    def _end_of(self, index: int) -> int:
        ends = index + 1 < len(self._begins)
        return self._begins[index + 1] if ends else len(self._sampled)


def reasoning_tokens(tokenizer: Tokenizer, ids: Sequence[int], reasoning: str | None) -> int:
    """How many of an answer's tokens have a part of its reasoning, without the markers around it.

    Where parts of it were joined by what was not sampled, it is the number of tokens that the
    reasoning has by itself.
    """
    if not reasoning:
        return 0
    stream, sampled = DecodeStream(skip_special_tokens=False), ""
    begins = []
    for token in ids:
        begins.append(len(sampled))
        sampled += stream.step(tokenizer.fast, token) or ""
    begin = sampled.find(reasoning)
    if begin < 0:
        return min(len(tokenizer.encode(reasoning)), len(ids))
    first = bisect_right(begins, begin) - 1
    while first > 0 and begins[first - 1] == begin:
        first -= 1  # tokens that are a part of the first character
    return bisect_right(begins, begin + len(reasoning) - 1) - first


def _common(sampled: str, at: int, text: str) -> int:
    """The length of the common beginning of `sampled[at:]` and `text`."""
    if sampled.startswith(text, at):
        return len(text)
    pairs = zip(sampled[at : at + len(text)], text, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), len(sampled) - at)
