"""Messages and texts as JSON for the page, cut to what a page can show.

Invariant: the size of an answer does not depend on what agents and models wrote. A text that was
cut says how long it is, and the page reads the rest piece by piece; no piece ends within what
stands for an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import orjson

from proxy.conversation.images import uncut
from proxy.conversation.messages import Message, load_answer
from proxy.conversation.recorded import load_message
from proxy.extras.view.answers import CutText, MessageJson, ToolCallJson, TurnJson
from proxy.records import Turn

SHOWN_CHARS = 8_000
"""Characters of a text that are sent at first; about 150 lines."""
PIECE_CHARS = 64_000
"""Characters of a text that are sent at a time when the reader asks for more."""
MAX_MESSAGES = 200
MAX_CALLS = 100
MAX_DIGITS = 9
"""Of the number of a message or call; Python refuses to read thousands."""
T = TypeVar("T")


def cut(text: str, chars: int = SHOWN_CHARS) -> CutText | str:
    """The text, or its beginning with its length."""
    if len(text) <= chars:
        return text
    return {"text": text[: uncut(text, chars)], "chars": len(text)}


def message_json(message: Message, chars: int = SHOWN_CHARS) -> MessageJson:
    """`chars`: characters of each text that are shown."""
    calls: list[ToolCallJson] = [
        {"id": call.id[:200], "name": call.name[:200], "arguments": cut(call.arguments, chars)}
        for call in message.tool_calls[:MAX_CALLS]
    ]
    return {
        "role": message.role,
        "text": cut(message.text, chars),
        "reasoning": cut(message.reasoning, chars) if message.reasoning else None,
        "tool_calls": calls,
        "more_calls": max(0, len(message.tool_calls) - MAX_CALLS),
        "tool_call_id": message.tool_call_id and message.tool_call_id[:200],
    }


def turn_json(turn: Turn, chars: int = SHOWN_CHARS, most_messages: int = MAX_MESSAGES) -> TurnJson:
    """What a turn adds to its conversation: the request's new messages, and the answer."""
    fields = _request(turn)
    messages = fields.get("messages", [])
    tools = fields.get("tools", [])
    return {
        "index": turn.index,
        "recorded": bool(turn.request),
        "after": fields.get("after"),
        "same_as": fields.get("same_as"),
        "messages": [message_json(load_message(each), chars) for each in messages[:most_messages]],
        "more_messages": max(0, len(messages) - most_messages),
        "tools": [str(tool.get("function", {}).get("name", "?"))[:200] for tool in tools[:100]],
        "answer": message_json(load_answer(turn.answer), chars) if turn.answer else None,
        "sampling": dict(turn.sampling),
    }


def text_of(turn: Turn, place: str) -> str | None:
    """The whole text at a place: `answer.text`, `3.text` (of the request's fourth message),
    `answer.calls.0`, `tools`. None if there is none."""
    where, _, what = place.partition(".")
    if where == "tools":
        return orjson.dumps(_request(turn).get("tools", []), option=orjson.OPT_INDENT_2).decode()
    message = _message_at(turn, where)
    if message is None:
        return None
    if what in ("text", "reasoning"):
        return str(getattr(message, what) or "")
    call = _entry(message.tool_calls, what.removeprefix("calls."))
    return None if call is None else call.arguments


def _message_at(turn: Turn, where: str) -> Message | None:
    if where == "answer":
        return load_answer(turn.answer) if turn.answer else None
    found = _entry(_request(turn).get("messages", []), where)
    return None if found is None else load_message(found)


def _entry(entries: Sequence[T], number: str) -> T | None:
    """The entry of this number; None if there is none."""
    if number.isdecimal() and len(number) <= MAX_DIGITS and int(number) < len(entries):
        return entries[int(number)]
    return None


def _request(turn: Turn) -> dict[str, Any]:
    return orjson.loads(turn.request) if turn.request else {}
