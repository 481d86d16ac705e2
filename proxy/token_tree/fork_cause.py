"""Decides the cause of a fork: why a request does not continue what is recorded.

`fork_cause` finds the first message that differs from the record. If it is the assistant's, the
cause is how it differs from the recorded answers. `AnswerMarks` are what memory keeps of the
content of an answer: digests and the beginnings of two lines. Invariant: a cause is returned only
if the record proves it; the most specific one is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec

from proxy.conversation.message_keys import ConversationKey, Key, RawKey, canonical_calls
from proxy.conversation.messages import Message, split_reasoning
from proxy.records import ForkCause

if TYPE_CHECKING:
    from proxy.token_tree.tree import Match, Node, TokenTree

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


def fork_cause(
    tree: TokenTree, messages: list[Message], keys: Sequence[Key], match: Match
) -> ForkCause:
    """Why a conversation could not extend the turn of its last recorded answer, `match`.

    `keys` has one key per message.
    """
    known = _last_known(tree, keys)
    if any(message.compacted for message in messages[known + 1 :]):
        return ForkCause.COMPACTION
    if known >= 0 and known + 1 < len(messages):
        asked = tree.same_requests(keys[known])
        return _cause_after(tree, messages[known + 1], asked, match)
    if known >= 0:  # every message is known, but the turn could not be extended
        return ForkCause.UNPROVABLE_BRIDGE
    for position in reversed(range(len(keys))):
        key = keys[position]
        other = None if isinstance(key, RawKey) else tree.same_body(key)
        if other is not None and not isinstance(key, RawKey):
            return _cause_at(tree, other, key, messages[position + 1 :], match)
    if is_quoted(messages, set(tree.quotes[-QUOTED_TURNS:])):
        return ForkCause.COMPACTION
    return ForkCause.NEW_CONVERSATION


def foreign_cause(tree: TokenTree, messages: list[Message], keys: Sequence[Key]) -> ForkCause:
    """Why a conversation follows a recorded answer with an assistant message that is not one: how
    that message differs from the answer in whose place it stands, if there is one."""
    known = _last_known(tree, keys)
    message = messages[known + 1] if 0 <= known < len(messages) - 1 else None
    if message is None or message.role != "assistant":
        return ForkCause.FOREIGN_ASSISTANT
    answers = [node.marks for node in tree.same_requests(keys[known]) if node.marks is not None]
    return cause_of(message, answers, follows=tree.follows)


def _last_known(tree: TokenTree, keys: Sequence[Key]) -> int:
    """Index of the last message up to which the conversation was recorded; -1 if none is."""
    return next((i for i in reversed(range(len(keys))) if tree.knows_messages(keys[i])), -1)


def _cause_at(
    tree: TokenTree, other: Node, key: ConversationKey, following: list[Message], match: Match
) -> ForkCause:
    """Why a conversation forks that has the messages of `other`, but another key."""
    recorded = other.request_key
    if isinstance(recorded, RawKey) or recorded.system != key.system:
        return ForkCause.SYSTEM_CHANGED
    if recorded.tools != key.tools:
        return ForkCause.TOOLS_CHANGED
    # The same request except for a forced call.
    return _cause_after(tree, following[0], [other], match) if following else ForkCause.SIBLING


def _cause_after(tree: TokenTree, message: Message, asked: list[Node], match: Match) -> ForkCause:
    """Why `message` differs from the record after the last known message."""
    if message.role == "assistant":
        answers = [node.marks for node in asked if node.marks is not None]
        return cause_of(message, answers, follows=tree.follows)
    node = None if match.node is None else tree.nodes[match.node]
    if asked:
        return ForkCause.ROLLED_BACK
    if node is not None and node.children:
        return ForkCause.EDITED
    return ForkCause.UNPROVABLE_BRIDGE


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
