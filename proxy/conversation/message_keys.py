"""Keys by which equal conversations are found.

A conversation has one key per message. Each key depends on all messages up to that one, so that a
single look-up finds the turn that a conversation continues. Keys are computed from **canonical
messages**: tool arguments by value, tool results by the position of their call instead of its id,
an assistant's text without surrounding white space, and its reasoning only if the profile follows
the agent.

Invariant: equal canonical conversations have equal keys in every process and every release that
reads the same store, which keeps the `stored` form.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b, sha256
from itertools import compress, count
from operator import attrgetter, ne
from typing import NamedTuple

import orjson

from proxy.conversation.json_values import canonical_arguments
from proxy.conversation.messages import Conversation, Message, split_reasoning
from proxy.errors import RequestError

STORED_BYTES = 48
LIMIT_BYTES = 2**18
"""Limit of a session's `KnownKeys`: 1,300 messages."""
MESSAGE_BYTES = 200
"""Memory per message: a key with two digests of its own, and a fingerprint."""
MIN_MESSAGES = 8
"""For shorter conversations, computing the keys is faster than looking them up."""
CONVERSATIONS = 4
"""Number of conversations per session: an agent and some sub-agents that take turns."""


class ConversationKey(NamedTuple):
    """Identifies a conversation up to one of its messages. All digests are BLAKE2b."""

    chain: bytes
    """16 bytes: tools, system and every message."""
    tools: bytes
    """8 bytes."""
    system: bytes
    """8 bytes: the system messages before the first message of another role."""
    body: bytes
    """16 bytes: every message after those, without the tools."""

    @property
    def has_system(self) -> bool:
        return self.system != _NO_SYSTEM

    @property
    def has_body(self) -> bool:
        return self.body != _NO_BODY

    def stored(self) -> bytes:
        return b"".join(self)

    def then(self, digest: bytes) -> ConversationKey:
        """The key with one more message, which is not a leading system message."""
        chain, body = _digest(self.chain + digest, 16), _digest(self.body + digest, 16)
        return ConversationKey(chain, self.tools, self.system, body)

    def answered(self, answer: Message, *, with_reasoning: bool = False) -> ConversationKey:
        """The key of the conversation with `answer` appended, by which a continuation is found."""
        return self.then(message_digest(answer, [], with_reasoning=with_reasoning))

    def begun(self, kind: str, text: str) -> ConversationKey:
        """The key of the same conversation as another request: of a `kind` of opening (forced call,
        prefill) that is `text`, or to the policy `text`."""
        return self._replace(chain=_digest(self.chain + kind.encode() + text.encode(), 16))


class RawKey(NamedTuple):
    """Identifies a prompt without messages (Completions), or such a prompt with its answer."""

    chain: bytes
    """16 bytes: digest of the whole text or of all ids."""
    length: int
    """Number of characters or ids."""

    def begun(self, kind: str, text: str) -> RawKey:
        """As `ConversationKey.begun`."""
        return self._replace(chain=_digest(self.chain + kind.encode() + text.encode(), 16))

    def stored(self) -> bytes:
        return self.chain + self.length.to_bytes(8, "little") + _RAW_MARK + _NO_BODY


Key = ConversationKey | RawKey

_NO_SYSTEM = bytes(8)
_NO_BODY = bytes(16)
_RAW_MARK = b"raw-text"
"""Marks the stored form, in the place of a conversation's system digest."""


def key_from_stored(data: bytes) -> Key:
    """Reads `Key.stored()`. Raises ValueError for bytes of another length."""
    if len(data) != STORED_BYTES:
        raise ValueError(f"a stored key has {STORED_BYTES} bytes, got {len(data)}")
    if data[24:32] == _RAW_MARK:
        return RawKey(data[:16], int.from_bytes(data[16:24], "little"))
    return ConversationKey(data[:16], data[16:24], data[24:32], data[32:])


def conversation_keys(
    conversation: Conversation,
    *,
    with_reasoning: bool = False,
    known: Sequence[ConversationKey] = (),
) -> list[ConversationKey]:
    """One key per message; the last one is the request's. `known` are those of the first messages,
    if the caller has them; they are taken over."""
    messages, keys = conversation.messages, list(known)
    if keys:
        chain, tools, system, body = keys[-1]
    else:
        tools = _digest(orjson.dumps(conversation.tools, option=orjson.OPT_SORT_KEYS), 8)
        chain, system, body = tools, _NO_SYSTEM, _NO_BODY
    in_system, calls = body == _NO_BODY, _open_calls(messages[: len(keys)])
    for message in messages[len(keys) :]:
        digest = message_digest(message, calls, with_reasoning=with_reasoning)
        chain = blake2b(chain + digest, digest_size=16).digest()
        in_system = in_system and message.role == "system"
        if in_system:
            system = blake2b(system + digest, digest_size=8).digest()
        else:
            body = blake2b(body + digest, digest_size=16).digest()
        keys.append(ConversationKey(chain, tools, system, body))
        if message.role == "assistant":
            calls = [call.id for call in message.tool_calls]
    return keys


def _open_calls(messages: Sequence[Message]) -> list[str]:
    """Ids of the last assistant's calls."""
    answers = (message for message in reversed(messages) if message.role == "assistant")
    last = next(answers, None)
    return [] if last is None else [call.id for call in last.tool_calls]


@dataclass(frozen=True, slots=True)
class _Known:
    fingerprints: array[int]
    """One for the tools, then one per message."""
    keys: Sequence[ConversationKey]

    def common(self, fingerprints: array[int]) -> int:
        """Number of leading messages that both conversations share; 0 if the tools differ."""
        size = min(len(self.fingerprints), len(fingerprints))
        if self.fingerprints[:size] == fingerprints[:size]:
            return size - 1
        differs = map(ne, self.fingerprints, fingerprints)
        return max(0, next(compress(count(), differs)) - 1)


class KnownKeys:
    """Caches the keys of a session's last conversations, so that only new messages need new keys.

    An agent sends its whole history with every call, and each key depends on all messages before
    it. The cache holds the keys and one 64-bit fingerprint per message, but no content. Several
    threads may use it at the same time. Invariant: the keys are those that `conversation_keys`
    returns. Two different messages have the same fingerprint with a probability of 2^-64:
    fingerprints are Python's string hashes, whose seed differs for each process.
    """

    def __init__(self) -> None:
        self._known: tuple[_Known, ...] = ()

    @property
    def memory_bytes(self) -> int:
        """Size of the session's keys and fingerprints in bytes, at most LIMIT_BYTES."""
        return sum(len(known.keys) for known in self._known) * MESSAGE_BYTES

    def clear(self) -> None:
        """Empties the cache."""
        self._known = ()

    def keys(
        self, conversation: Conversation, *, with_reasoning: bool = False
    ) -> list[ConversationKey]:
        """See `conversation_keys`."""
        make = partial(conversation_keys, conversation, with_reasoning=with_reasoning)
        if len(conversation.messages) < MIN_MESSAGES:
            return make()
        fingerprints = _fingerprints(conversation, with_reasoning)
        found = [(known.common(fingerprints), known) for known in self._known]
        size, best = max(found, key=lambda pair: pair[0], default=(0, None))
        keys = make(known=best.keys[:size] if best is not None else ())
        continued = best if best is not None and 2 * size >= len(best.keys) else None
        self._keep(continued, _Known(fingerprints, keys))
        return keys

    def _keep(self, continued: _Known | None, new: _Known) -> None:
        """Adds `new`, and removes the conversation that it continues, if there is one."""
        most = LIMIT_BYTES // MESSAGE_BYTES
        kept = [known for known in self._known if known is not continued][1 - CONVERSATIONS :]
        kept.append(_Known(new.fingerprints[: most + 1], tuple(new.keys[:most])))
        while sum(len(known.keys) for known in kept) > most:
            kept.pop(0)
        self._known = tuple(kept)


def _fingerprints(conversation: Conversation, with_reasoning: bool) -> array[int]:
    tools = orjson.dumps(conversation.tools, option=orjson.OPT_SORT_KEYS)
    messages = conversation.messages
    said: list[tuple[object, ...]] = [*map(_SAID, messages)]
    for at in compress(count(), map(_CALLS, messages)):
        calls = [(call.id, call.name, call.arguments) for call in messages[at].tool_calls]
        said[at] = (*said[at], *calls)
    return array("q", [hash((with_reasoning, tools)), *map(hash, said)])


_SAID = attrgetter("role", "text", "reasoning", "tool_call_id")
_CALLS = attrgetter("tool_calls")


def continued(
    conversation: Conversation, answered: ConversationKey, answer: Message
) -> list[ConversationKey]:
    """Inserts the answer that the conversation continues before its messages, and returns the keys.

    `answered` is that answer's key. Raises RequestError if the instructions or tools differ from
    those of the recorded conversation, whose history is recorded as tokens and cannot be rendered
    again.
    """
    messages = conversation.messages
    asked = conversation_keys(conversation)[-1]
    same_tools = not conversation.tools or asked.tools == answered.tools
    if not same_tools or (asked.has_system and asked.system != answered.system):
        raise RequestError(
            "previous_response_id: instructions and tools must be the same as in that response; "
            "send the whole input instead",
            param="previous_response_id",
        )
    while messages and messages[0].role == "system" and asked.has_system:
        messages.pop(0)
    conversation.messages = [answer, *messages]
    keys = [answered]
    calls = [call.id for call in answer.tool_calls]
    for message in messages:
        keys.append(keys[-1].then(message_digest(message, calls)))
    return keys


def raw_key(prompt: str | list[int]) -> RawKey:
    """The key of a prompt without messages, or of one with its answer appended."""
    data = b"t" + prompt.encode() if isinstance(prompt, str) else b"i" + orjson.dumps(prompt)
    return RawKey(_digest(data, 16), len(prompt))


def message_digest(
    message: Message, open_calls: Sequence[str], *, with_reasoning: bool = False
) -> bytes:
    """16 bytes. `open_calls` are the ids of the last assistant message's calls, in order."""
    if message.role == "assistant":
        canonical = _canonical_answer(message, with_reasoning)
    elif message.role == "tool":
        call_id = message.tool_call_id or ""
        position = open_calls.index(call_id) if call_id in open_calls else -1
        canonical = b"tool %d " % position + message.text.encode()
    else:
        canonical = _ROLE_MARKS[message.role] + message.text.encode()
    return sha256(canonical).digest()[:16]  # has hardware support: three times as fast as BLAKE2b


_ROLE_MARKS = {"system": b"system ", "user": b"user "}


def _canonical_answer(message: Message, with_reasoning: bool) -> bytes:
    reasoning, text = split_reasoning(message)
    said = b"assistant " + text.encode()
    if not message.tool_calls and not with_reasoning:
        return said
    shown = reasoning.encode() if with_reasoning else b""
    return b"\0".join((said, canonical_calls(message), shown))


def canonical_calls(message: Message) -> bytes:
    """The same bytes for two answers with the same calls, whatever their ids and formatting."""
    calls = (
        b"[" + orjson.dumps(call.name) + b"," + canonical_arguments(call.arguments) + b"]"
        for call in message.tool_calls
    )
    return b"[" + b",".join(calls) + b"]"


def _digest(data: bytes, size: int) -> bytes:
    return blake2b(data, digest_size=size).digest()
