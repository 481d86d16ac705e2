"""Calls of free-form tools, which take one text instead of arguments (`custom`).

The model is offered such a tool as a function with one string, `input`. Invariant: every call that
it makes has one text, which the agent gets and sends back, and is recorded as the call with that
text, so that what comes back is the same call.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import orjson
from msgspec.structs import replace

from proxy.conversation.json_values import parsed_arguments
from proxy.conversation.messages import Message

FREE_FORM: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
"""The schema of a free-form tool's arguments."""


def free_text(arguments: str) -> str:
    """The string `input` of the arguments; without one, the arguments as the model wrote them."""
    value = parsed_arguments(arguments)
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def free_arguments(text: str) -> str:
    """The arguments of a call with this text."""
    return orjson.dumps({"input": text}).decode()


def with_free_calls(message: Message, tools: Collection[str]) -> Message:
    """The message with its calls of the free-form `tools` as they come back from the agent."""
    if not any(call.name in tools for call in message.tool_calls):
        return message
    calls = [
        replace(call, arguments=free_arguments(free_text(call.arguments)))
        if call.name in tools
        else call
        for call in message.tool_calls
    ]
    return replace(message, tool_calls=calls)
