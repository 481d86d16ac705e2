"""Parses the body of a request with bounded work.

Invariant: an accepted body has at most MAX_CONTAINERS objects and lists, MAX_KEYS fields,
MAX_VALUES values and MAX_NESTING levels, so that later code may recurse into it and serialise it.
Any other body is refused before it is decoded, or by one pass over its levels.
"""

from __future__ import annotations

import re

import numpy as np
import orjson
from msgspec.structs import replace

from proxy.conversation import Conversation, Message
from proxy.conversation.json_values import is_deeper, loads
from proxy.errors import RequestError
from proxy.settings.profiles import AgentProfile
from proxy.wire.dialect import Call, Dialect, Headers
from proxy.wire.fields import Fields, Note
from proxy.wire.images import SentImages, settle

MAX_NESTING = 128
"""Levels of objects and lists in a body. orjson can write 254 levels; answers and engine requests
add levels of their own around parts of the body."""
MAX_CONTAINERS = 200_000
"""Objects and lists in a body; decoding this number takes about 50 ms. 20,000 messages have
60,000. One takes 2 bytes or more: `[]`."""
MAX_VALUES = 2_000_000
"""Commas outside strings. A prompt of a million token ids has a million."""
MAX_KEYS = 200_000
"""Fields of all objects in a body; decoding and freeing this number takes about 100 ms. One takes
5 bytes or more: `"":0,`."""
SMALL_BYTES = 6000
"""A smaller body is a prompt of fewer than 50,000 characters: a character takes a byte or more, and
a number that is written again, as 1e15, takes less than eight times its bytes."""
LARGE_BYTES = 2**20
LARGE_CONTAINERS = 2000
"""Larger bodies take more than about 10 ms to parse, key and render, which is done in a thread."""

NOTED_CHARS = 200
"""Characters of a removed text that its event has."""

_SHORT_BYTES = 10_000
"""`bytes.count` is faster for shorter bodies, NumPy for longer ones: five times at 400 kB."""
_PART_BYTES = 2**16
"""NumPy counts a body in parts of this size, so that no intermediate result needs new pages."""

_STRING = re.compile(rb'"[^"\\]*(?:\\(?:.|\Z)[^"\\]*)*(?:"|\Z)', re.DOTALL)
_TOKEN = re.compile(rb'(?P<string>"[^"\\]*(?:\\(?:.|\Z)[^"\\]*)*(?:"|\Z))|[\[\]{},]', re.DOTALL)
_SHOWN_LEVELS = 4


class Body:
    """A request's body. Example: parse_body(Body(b'{"model": "m"}'))"""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self._brackets: int | None = None

    @property
    def brackets(self) -> int:
        """Number of `{` and `[`, those within strings included: at least the objects and lists.
        Counted once. (In Python 3.11 a `cached_property` takes a lock.)"""
        if self._brackets is None:
            self._brackets = _count(self.data, b"{[")
        return self._brackets

    @property
    def is_large(self) -> bool:
        """Whether parsing the body should leave the event loop."""
        return len(self.data) > LARGE_BYTES or self.brackets > LARGE_CONTAINERS


def parse_call(
    dialect: Dialect,
    body: Body,
    headers: Headers,
    profile: AgentProfile,
    backends: frozenset[str] = frozenset(),
    *,
    images: SentImages | None = None,
) -> Call:
    """The call as the model is to see it. `backends` are the provider's tools that the proxy runs;
    `images` takes the images of the request, if the model reads them. Raises RequestError for a
    body that the dialect cannot honour."""
    fields = parse_body(body)
    fields.backends, fields.images = backends, images
    call = dialect.parse(fields, headers)
    referring = call.referring
    if settle(call.conversation.messages if referring is None else referring.items, images):
        call.images = images
    if call.conversation.prefill is not None:
        begun = Message("assistant", call.conversation.prefill)
        settle([begun], images)
        call.conversation.prefill = begun.text
    call.notes = fields.notes
    call.notes += scrub(call.conversation, profile)
    refers = call.referring is not None or call.conversation.continues is not None
    call.is_small = len(body.data) <= SMALL_BYTES and not refers
    call.is_large = body.is_large
    return call


def scrub(conversation: Conversation, profile: AgentProfile) -> list[Note]:
    """Removes what the profile scrubs, and system messages that are empty without it. Returns what
    was removed.

    Raises RequestError if no message is left.
    """
    messages, notes = conversation.messages, list[Note]()
    systems = [at for at, message in enumerate(messages) if message.role == "system"]
    for at in reversed(systems):
        text, removed = profile.scrubbed(messages[at].text)
        notes += [
            Note("scrubbed", pattern, f"messages[{at}]", was[:NOTED_CHARS])
            for pattern, was in removed
        ]
        if messages[at].text and not text:
            del messages[at]
        elif text != messages[at].text:
            messages[at] = replace(messages[at], text=text)
    if systems and not messages:
        raise RequestError("messages: expected at least one message with text", param="messages")
    return notes


def parse_body(body: Body) -> Fields:
    """Raises RequestError for a body that is not a JSON object within the bounds above."""
    _refuse_size(body)
    try:
        data = loads(body.data)
    except orjson.JSONDecodeError as error:
        _refuse_depth(body.data)
        raise RequestError(f"the body is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise RequestError("the body is JSON, but not an object: send an object with the fields")
    if body.brackets > MAX_NESTING and is_deeper(data, MAX_NESTING):
        _refuse_depth(body.data)
    return Fields(data)


def _refuse_size(body: Body) -> None:
    size = len(body.data)
    if (
        (size <= 2 * MAX_CONTAINERS or body.brackets <= MAX_CONTAINERS)
        and (size <= MAX_VALUES or _count(body.data, b",") <= MAX_VALUES)
        and (size <= 5 * MAX_KEYS or _count(body.data, b":") <= MAX_KEYS)
    ):
        return
    without_strings = _STRING.sub(b"", body.data)
    found = Body(without_strings).brackets
    if found > MAX_CONTAINERS:
        raise RequestError(
            f"the body has {found} objects and lists; at most {MAX_CONTAINERS} are allowed; send "
            "fewer messages or tools",
            status=413,
        )
    keys = without_strings.count(b":")
    if keys > MAX_KEYS:
        raise RequestError(
            f"the body has {keys} fields; at most {MAX_KEYS} are allowed; send fewer",
            status=413,
        )
    values = without_strings.count(b",")
    if values > MAX_VALUES:
        raise RequestError(
            f"the body has {values} values; at most {MAX_VALUES} are allowed; send fewer",
            status=413,
        )


def _count(data: bytes, marks: bytes) -> int:
    """Number of bytes that are one of `marks`."""
    if len(data) < _SHORT_BYTES:
        return sum(map(data.count, marks))
    codes, found = np.frombuffer(data, np.uint8), 0
    for at in range(0, len(codes), _PART_BYTES):
        part = codes[at : at + _PART_BYTES]
        found += sum(int(np.count_nonzero(part == mark)) for mark in marks)
    return found


def _refuse_depth(body: bytes) -> None:
    """Raises RequestError that names the field that is nested too deep, if there is one."""
    place = _deep_place(body)
    if place is not None:
        raise RequestError(
            f"{place}: nested too deep: a body may have at most {MAX_NESTING} levels of objects "
            "and lists; flatten it, or send it as a string",
            param=place,
        )


def _deep_place(body: bytes) -> str | None:
    """The first levels of the path to the first value that is nested deeper than MAX_NESTING."""
    path: list[str | int] = []
    for token in _TOKEN.finditer(body):
        mark = token[0]
        if mark in (b"{", b"["):
            path.append(0 if mark == b"[" else "")
            if len(path) > MAX_NESTING:
                return _written(path[:_SHOWN_LEVELS])
        elif mark in (b"}", b"]"):
            if path:
                path.pop()
        elif path and mark == b",":
            path[-1] = path[-1] + 1 if isinstance(path[-1], int) else ""
        elif path and path[-1] == "":
            path[-1] = mark.strip(b'"').decode(errors="replace")[:80]
    return None


def _written(path: list[str | int]) -> str:
    parts = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return "".join(parts).lstrip(".") or "body"
