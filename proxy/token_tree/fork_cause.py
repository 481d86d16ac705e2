"""Decides the cause of a fork from how an assistant's message differs from the recorded answers.

`TokenTree` finds the first message of a request that differs from the record. If it is the
assistant's, `cause_of` compares it with the recorded answers in its place. `AnswerMarks` are what
memory keeps of the content of an answer: digests and the beginnings of two lines. Invariant: a
cause is returned only if the record proves it; the most specific one is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from hashlib import blake2b

import msgspec

from proxy.conversation.message_keys import canonical_calls
from proxy.conversation.messages import Message, split_reasoning
from proxy.records import ForkCause

QUOTED_TURNS = 64
"""Number of latest turns that are searched for a line that a summary quotes; bounds the cost."""
QUOTE_CHARS = 80
"""Number of characters kept of the longest line of an answer's text and of its reasoning."""
MIN_QUOTE_CHARS = 40
"""Text that repeats this many characters of an answer's longest line counts as a quotation."""


class AnswerMarks(msgspec.Struct, frozen=True, gc=False):
    """A summary of an answer's content. Example: AnswerMarks.of(Message("assistant", "5"))"""

    text: bytes
    letters: bytes
    """Digest of the text without any white space."""
    letter_count: int
    call_names: bytes
    calls: bytes
    reasoning: bytes
    quote: str
    """The beginning of the text's longest line; empty if that is too short to be recognised."""
    reasoning_quote: str

    @staticmethod
    def of(answer: Message) -> AnswerMarks:
        reasoning, text = split_reasoning(answer)
        letters, quote = _letters(text), _quote(text)
        return AnswerMarks(
            text=_digest(text),
            letters=_digest(letters),
            letter_count=len(letters),
            call_names=_digest("\0".join(call.name for call in answer.tool_calls)),
            calls=_digest(canonical_calls(answer)) if answer.tool_calls else _NO_CALLS,
            reasoning=_digest(reasoning),
            quote=quote if len(quote) >= MIN_QUOTE_CHARS else "",
            reasoning_quote=_quote(reasoning),
        )


def cause_of(message: Message, recorded: Sequence[AnswerMarks], *, follows: bool) -> ForkCause:
    """Why `message` differs from all `recorded` answers to the same request."""
    if not recorded:
        return ForkCause.FOREIGN_ASSISTANT
    sent = AnswerMarks.of(message)
    return min(
        (_difference(sent, message, answer, follows) for answer in recorded), key=_LIKELIEST.index
    )


def is_quoted(messages: Sequence[Message], quotes: AbstractSet[str]) -> bool:
    """Whether a message that is not the assistant's repeats a line of a recorded answer; `quotes`
    are those of `AnswerMarks`."""
    texts = [message.text for message in messages if message.role != "assistant"]
    return any(quote in text for quote in quotes if quote for text in texts)


_LIKELIEST = (
    ForkCause.REASONING_DROPPED,
    ForkCause.REASONING_CHANGED,
    ForkCause.WHITE_SPACE,
    ForkCause.REASONING_MOVED,
    ForkCause.TEXT_DROPPED,
    ForkCause.CALLS_CHANGED,
    ForkCause.TOOL_ARGUMENTS,
    ForkCause.EDITED,
)
"""From the smallest difference to the largest. With several recorded answers, the message most
likely stems from the one with the smallest difference."""


def _difference(
    sent: AnswerMarks, message: Message, answer: AnswerMarks, follows: bool
) -> ForkCause:
    if sent.calls != answer.calls:
        same_tools = sent.call_names == answer.call_names
        if sent.letters != answer.letters:
            return ForkCause.EDITED
        return ForkCause.TOOL_ARGUMENTS if same_tools else ForkCause.CALLS_CHANGED
    if sent.text == answer.text:
        missing = follows and sent.reasoning == _NOTHING
        return ForkCause.REASONING_DROPPED if missing else ForkCause.REASONING_CHANGED
    if sent.letters == answer.letters:
        return ForkCause.WHITE_SPACE
    if _holds_reasoning(message, answer):
        return ForkCause.REASONING_MOVED
    return ForkCause.TEXT_DROPPED if sent.text == _NOTHING else ForkCause.EDITED


def _holds_reasoning(message: Message, answer: AnswerMarks) -> bool:
    """Whether the message's text is the answer's text with the reasoning before or after it."""
    if not answer.reasoning_quote or answer.reasoning_quote not in message.text:
        return False
    letters, count = _letters(message.text), answer.letter_count
    ends = (letters[len(letters) - count :], letters[:count])
    return any(_digest(end) == answer.letters for end in ends)


def _letters(text: str) -> str:
    """The text without white space."""
    return text.translate(_ASCII_SPACE) if text.isascii() else "".join(text.split())


def _quote(text: str) -> str:
    return max(text.splitlines(), key=len, default="").strip()[:QUOTE_CHARS]


def _digest(content: str | bytes) -> bytes:
    if not content:
        return _NOTHING
    data = content if isinstance(content, bytes) else content.encode()
    return blake2b(data, digest_size=8).digest()


_ASCII_SPACE = {code: None for code in range(128) if chr(code).isspace()}
_NOTHING = blake2b(digest_size=8).digest()
_NO_CALLS = _digest(canonical_calls(Message("assistant")))
