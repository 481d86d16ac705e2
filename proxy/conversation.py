"""What an agent asked, free of its dialect; and what makes two messages the same message.

Every dialect parses its request into a `Conversation` and writes its answer from an assistant
`Message`. Matching against the record compares **digests of canonical messages**: tool arguments
parsed, text and block content alike, tool results named by the position of the call that they
answer rather than by its id, surrounding white space of an assistant's text and (unless the
profile follows the agent) its reasoning left out.

Invariant: `Keys` are chained, `keys[i]` depending on all messages up to `i`, so that one look-up of
a digest finds the turn that a conversation continues, whatever its length.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b, sha256
from typing import Any, Literal

import orjson

from proxy.errors import RequestError

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(slots=True)
class ToolCall:
    """Example: ToolCall(id="call_3f…", name="shell", arguments='{"cmd": "ls"}')"""

    id: str
    name: str
    arguments: str
    """JSON text. What an agent sends back may be any text: it is compared by what it parses to."""


@dataclass(slots=True)
class Message:
    """Example: Message("tool", "3 files", tool_call_id="call_3f…")"""

    role: Role
    text: str = ""
    reasoning: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)
    tool_call_id: str | None = None
    """On a tool's result: the call that it answers."""


@dataclass(slots=True)
class KnownKeys:
    """Keys of a conversation, which one that begins with the same messages takes over."""

    messages: list[Message] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    under: tuple[bytes, bool] = (b"", False)
    """The tools as JSON, and whether reasoning counts."""

    def copy(self) -> KnownKeys:
        return KnownKeys(self.messages, self.keys, self.under)


@dataclass(slots=True)
class Conversation:
    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    """As in Chat Completions: `{"type": "function", "function": {"name", "parameters", …}}`."""
    continues: int | None = None
    """The turn that `messages` come after, where the agent names it instead of repeating it."""
    prefill: str | None = None
    """Text that the answer begins with: the agent wrote it, and the model goes on from it."""
    raw: str | list[int] | None = None
    """A prompt without messages, as text or ids (Completions)."""
    known: KnownKeys | None = None
    """Of the conversation that this one probably continues; of this one, once it has keys."""


CHAIN = slice(0, 16)
"""Of a key: tools, system and every message up to here."""
TOOLS = slice(16, 24)
SYSTEM = slice(24, 32)
"""The messages before the first one that is not the system's."""
BODY = slice(32, 48)
"""Every message up to here but the system's first, and without the tools."""


def conversation_keys(conversation: Conversation, *, with_reasoning: bool = False) -> list[bytes]:
    """A key of 48 bytes per message; the last one is the request's.

    Raises RequestError for JSON that is nested too deep.
    """
    known = conversation.known or KnownKeys()
    messages = conversation.messages
    under = (_dump(conversation.tools, sort=False), with_reasoning)
    start = _common_messages(known, messages) if known.under == under else 0
    keys = known.keys[:start]
    if start:
        last = keys[-1]
        chain, system, body, tools = last[CHAIN], last[SYSTEM], last[BODY], last[TOOLS]
    else:
        tools = _digest(_dump(conversation.tools), 8)
        chain, system, body = tools, bytes(8), bytes(16)
    middle = tools + system
    calls = _open_calls(messages[:start])
    in_system = body == bytes(16)
    for message in messages[start:]:
        digest = message_digest(message, calls, with_reasoning=with_reasoning)
        chain = blake2b(chain + digest, digest_size=16).digest()
        in_system = in_system and message.role == "system"
        if in_system:
            system = blake2b(system + digest, digest_size=8).digest()
            middle = tools + system
        else:
            body = blake2b(body + digest, digest_size=16).digest()
        keys.append(chain + middle + body)
        if message.role == "assistant":
            calls = [call.id for call in message.tool_calls]
    known.messages, known.keys, known.under = list(messages), list(keys), under
    return keys


def continued(conversation: Conversation, answered: bytes, answer: Message) -> list[bytes]:
    """Puts the answer that the conversation continues before its messages, and gives the keys.

    `answered` is that answer's key. Raises RequestError where instructions or tools are not those
    of the recorded conversation: its history is kept as tokens, which cannot be rendered anew.
    """
    messages = conversation.messages
    asked = conversation_keys(conversation)[-1]
    own_system = asked[SYSTEM] != bytes(8)
    same_tools = not conversation.tools or asked[TOOLS] == answered[TOOLS]
    if not same_tools or (own_system and asked[SYSTEM] != answered[SYSTEM]):
        raise RequestError(
            "previous_response_id: instructions and tools must be those of that response; send "
            "the whole input instead",
            param="previous_response_id",
        )
    while messages and messages[0].role == "system" and own_system:
        messages.pop(0)
    conversation.messages = [answer, *messages]
    keys, chain, body = [answered], answered[CHAIN], answered[BODY]
    calls = [call.id for call in answer.tool_calls]
    for message in messages:
        digest = message_digest(message, calls)
        chain, body = _digest(chain + digest, 16), _digest(body + digest, 16)
        keys.append(_key(chain, answered[TOOLS], answered[SYSTEM], body))
    return keys


RAW = b"raw-text"
"""In place of a system's digest: the key of a prompt without messages; its length is in TOOLS."""


def raw_key(prompt: str | list[int]) -> bytes:
    data = prompt.encode() if isinstance(prompt, str) else _dump(prompt)
    kind = b"t" if isinstance(prompt, str) else b"i"
    chain = _digest(kind + data, 16)
    return _key(chain, len(prompt).to_bytes(8, "little"), RAW, bytes(16))


def opened_key(request_key: bytes, kind: bytes, text: str) -> bytes:
    """The same conversation with an answer that was begun for the model is another request."""
    chain = _digest(request_key[CHAIN] + kind + text.encode(), 16)
    return chain + request_key[16:]


def answer_key(request_key: bytes, answer: Message, *, with_reasoning: bool = False) -> bytes:
    """The key of the conversation with `answer` appended: what a continuation is matched by."""
    digest = message_digest(answer, [], with_reasoning=with_reasoning)
    return _key(
        _digest(request_key[CHAIN] + digest, 16),
        request_key[TOOLS],
        request_key[SYSTEM],
        _digest(request_key[BODY] + digest, 16),
    )


def message_digest(
    message: Message, open_calls: Sequence[str], *, with_reasoning: bool = False
) -> bytes:
    """`open_calls` are the ids of the assistant's calls before this message, in order."""
    if message.role == "assistant":
        canonical = _canonical_answer(message, with_reasoning)
    elif message.role == "tool":
        call_id = message.tool_call_id or ""
        position = open_calls.index(call_id) if call_id in open_calls else -1
        canonical = b"tool %d " % position + message.text.encode()
    else:
        canonical = _ROLE_MARKS[message.role] + message.text.encode()
    return sha256(canonical).digest()[:16]  # processors have it; three times blake2b's speed


_ROLE_MARKS = {"system": b"system ", "user": b"user "}


def _canonical_answer(message: Message, with_reasoning: bool) -> bytes:
    text = b"assistant " + message.text.strip().encode()
    if not message.tool_calls and not with_reasoning:
        return text
    calls = [[call.name, arguments_object(call)] for call in message.tool_calls]
    reasoning = (message.reasoning or "").strip() if with_reasoning else ""
    return b"\0".join((text, _dump(calls), reasoning.encode()))


def parsed_arguments(text: str) -> Any:
    """A tool call's arguments as JSON; text that is none stays text, and nothing is `{}`."""
    if not text.strip():
        return {}
    try:
        value = orjson.loads(text)
        if text.count("{") + text.count("[") > SAFE_BRACKETS:
            orjson.dumps(value)  # it writes less deep than it reads
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return text
    return value


SAFE_BRACKETS = 200
"""Values with no more can be written as they were read."""


def arguments_object(call: ToolCall) -> dict[str, Any]:
    """As some dialects want them; anything else that the model wrote is shown inside an object."""
    arguments = parsed_arguments(call.arguments)
    return arguments if isinstance(arguments, dict) else {"arguments": arguments}


def merged(messages: Iterable[Message]) -> list[Message]:
    """Neighbouring assistant messages as one: some agents split a turn of several calls."""
    out: list[Message] = []
    for message in messages:
        if out and message.role == "assistant" == out[-1].role:
            out[-1] = _joined(out[-1], message)
        else:
            out.append(message)
    return out


def dump_answer(message: Message) -> bytes:
    """The neutral JSON that a `Turn` keeps as its `answer`."""
    return orjson.dumps(
        {
            "text": message.text,
            "reasoning": message.reasoning,
            "tool_calls": [
                {"id": call.id, "name": call.name, "arguments": call.arguments}
                for call in message.tool_calls
            ],
        }
    )


def load_answer(data: bytes) -> Message:
    fields = orjson.loads(data)
    return Message(
        "assistant",
        fields["text"],
        fields["reasoning"],
        [ToolCall(call["id"], call["name"], call["arguments"]) for call in fields["tool_calls"]],
    )


def _joined(first: Message, second: Message) -> Message:
    texts = [message.text for message in (first, second) if message.text]
    reasoning = [message.reasoning for message in (first, second) if message.reasoning]
    calls = [*first.tool_calls, *second.tool_calls]
    return Message("assistant", "\n".join(texts), "\n".join(reasoning) or None, calls)


def _common_messages(known: KnownKeys, messages: list[Message]) -> int:
    """How many messages two conversations begin with in common."""
    size = min(len(known.messages), len(messages))
    if known.messages[:size] == messages[:size]:
        return size
    pairs = enumerate(zip(known.messages, messages, strict=False))
    return next(i for i, (mine, other) in pairs if mine != other)


def _open_calls(messages: list[Message]) -> list[str]:
    """Ids of the last assistant's calls."""
    last = next((m for m in reversed(messages) if m.role == "assistant"), None)
    return [] if last is None else [call.id for call in last.tool_calls]


def _key(chain: bytes, tools: bytes, system: bytes, body: bytes) -> bytes:
    return chain + tools + system + body


def _dump(value: Any, *, sort: bool = True) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS if sort else None)
    except orjson.JSONEncodeError as error:
        raise RequestError(f"messages: cannot be written as JSON: {error}") from error


def _digest(data: bytes, size: int) -> bytes:
    return blake2b(data, digest_size=size).digest()
