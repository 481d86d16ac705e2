"""Caches the keys of a session's last conversations, so that only new messages need new keys.

An agent sends its whole history with every call, and each key depends on all messages before it.
The cache holds the keys and one 64-bit fingerprint per message, but no content. Invariant: the keys
are those that `conversation_keys` returns. Two different messages have the same fingerprint with a
probability of 2^-64: fingerprints are Python's string hashes, whose seed differs for each process.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress, count
from operator import ne

import orjson

from proxy.conversation.message_keys import ConversationKey, conversation_keys
from proxy.conversation.messages import Conversation, Message

LIMIT_BYTES = 2**18
"""Limit per session: 1,300 messages."""
MESSAGE_BYTES = 200
"""Memory per message: a key with two digests of its own, and a fingerprint."""
MIN_MESSAGES = 8
"""For shorter conversations, computing the keys is faster than looking them up."""
CONVERSATIONS = 4
"""Number of conversations per session: an agent and some sub-agents that take turns."""


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
    """The cache of one session. Several threads may use it at the same time."""

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
    own = [hash((with_reasoning, tools)), *map(_fingerprint, conversation.messages)]
    return array("q", own)


def _fingerprint(message: Message) -> int:
    calls = [(call.id, call.name, call.arguments) for call in message.tool_calls]
    said = (message.role, message.text, message.reasoning, message.tool_call_id)
    return hash((*said, *calls))
