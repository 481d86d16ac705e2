"""OpenAI Responses: `POST /v1/responses`.

Input items become messages; the reasoning, text and calls of one turn become one assistant message.
Tools become functions: those of a namespace are named `namespace.name`, a free-form tool takes one
string `input`, and tools that the provider itself would run are left out. `previous_response_id`
names the recorded turn that the new input continues.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import orjson

from proxy.conversation.free_form import free_arguments
from proxy.conversation.messages import Conversation, Message, Role, ToolCall
from proxy.conversation.references import AnswerPart, ReferringConversation
from proxy.errors import ProxyError, RequestError
from proxy.wire.chat import MAX_TOP_LOGPROBS, json_object, openai_error, parse_content
from proxy.wire.dialect import Call, ForcedCall, Headers, Options, Outcome, read_sampling
from proxy.wire.fields import Fields
from proxy.wire.known_fields import unknown_fields
from proxy.wire.responses_stream import ResponsesWriter, answer_part, output_items, response_object

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}
_FREE_FORM = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}


class ResponsesDialect:
    """The dialect of `/v1/responses`."""

    name = "responses"
    route = "responses"

    def parse(self, fields: Fields, headers: Headers) -> Call:
        tools, kinds = parse_tools(fields.objects("tools"))
        items = parse_input(fields)
        instructions = fields.optional_text("instructions")
        if instructions:
            items.insert(0, Message("system", instructions))
        if not items:
            raise fields.refuse("input", "at least one item")
        conversation = Conversation([], tools)
        previous = fields.optional_text("previous_response_id")
        if previous is not None:
            conversation.continues = turn_of(previous)
        referring = ReferringConversation(conversation, items)
        if not referring.turns:
            referring.resolve({})
        return Call(
            referring=referring if referring.turns else None,
            model=fields.text("model", ""),
            conversation=conversation,
            options=_options(fields),
            stream=fields.flag("stream"),
            free_form=frozenset(name for name, kind in kinds.items() if kind == "custom"),
            extra={"kinds": kinds, "previous": previous, "created": int(time.time())},
            unknown=unknown_fields(fields, self.name),
        )

    def whole(self, call: Call, answer_id: str, outcomes: Sequence[Outcome]) -> bytes:
        outcome = outcomes[0]
        return orjson.dumps(response_object(call, outcome, output_items(call, answer_id, outcome)))

    def writer(self, call: Call, answer_id: str) -> ResponsesWriter:
        return ResponsesWriter(call, answer_id)

    def error(self, error: ProxyError) -> bytes:
        return openai_error(error)


def parse_input(fields: Fields) -> list[Message | AnswerPart]:
    """Raises RequestError for items that cannot be rendered for the model."""
    if isinstance(fields.get("input"), str):
        return [Message("user", fields.text("input"))]
    return [_parse_item(item) for item in fields.objects("input")]


def parse_tools(tools: list[Fields]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The functions for the model, and, by name, the kind of those that are not plain functions on
    the wire: `custom` or `namespace:NAME`."""
    functions: list[dict[str, Any]] = []
    kinds: dict[str, str] = {}
    for tool in tools:
        kind = tool.text("type", "function")
        if kind == "namespace":
            inner, _ = parse_tools(tool.objects("tools"))
            space = tool.text("name")
            for entry in inner:
                entry["function"]["name"] = f"{space}.{entry['function']['name']}"
                kinds[entry["function"]["name"]] = f"namespace:{space}"
            functions += inner
        elif kind in ("function", "custom"):
            functions.append(_function(tool, free_form=kind == "custom"))
            if kind == "custom":
                kinds[tool.text("name")] = "custom"
    return functions, kinds


def turn_of(response_id: str) -> int:
    """The index of the turn that a response id names. Raises RequestError (404)."""
    head, _, rest = response_id.partition("_")
    index = rest.partition("_")[0]
    if head != "resp" or not index.isdigit() or len(index) > 9:
        raise RequestError(
            f"previous_response_id: {response_id[:80]!r} is not a response of this session",
            param="previous_response_id",
            status=404,
        )
    return int(index)


def _parse_item(item: Fields) -> Message | AnswerPart:
    kind = item.text("type", "item_reference" if item.data.keys() == {"id"} else "message")
    if kind == "message":
        role = _ROLES.get(item.text("role"))
        if role is None:
            raise item.refuse("role", f"one of {', '.join(_ROLES)}")
        return Message(role, parse_content(item, "content"))
    if kind == "function_call":
        name, space = item.text("name"), item.optional_text("namespace")
        call = ToolCall(
            item.text("call_id", ""), f"{space}.{name}" if space else name, _json_text(item)
        )
        return Message("assistant", tool_calls=[call])
    if kind == "custom_tool_call":
        arguments = free_arguments(item.text("input", ""))
        call = ToolCall(item.text("call_id", ""), item.text("name"), arguments)
        return Message("assistant", tool_calls=[call])
    if kind in ("function_call_output", "custom_tool_call_output"):
        return Message("tool", _output(item), tool_call_id=item.text("call_id", ""))
    if kind == "reasoning":
        return Message("assistant", reasoning=_reasoning(item) or None)
    if kind == "item_reference":
        return answer_part(item.text("id"))
    raise item.refuse(
        "type",
        "message, reasoning, function_call, function_call_output, custom_tool_call, "
        "custom_tool_call_output or item_reference",
    )


def _json_text(item: Fields) -> str:
    arguments = item.get("arguments")
    return arguments if isinstance(arguments, str) else orjson.dumps(arguments or {}).decode()


def _output(item: Fields) -> str:
    output = item.get("output")
    if isinstance(output, dict | int | float | bool):
        return orjson.dumps(output).decode()
    return parse_content(item, "output")


def _reasoning(item: Fields) -> str:
    parts = [*item.objects("content"), *item.objects("summary")]
    return "\n".join(part.text("text", "") for part in parts)


def _function(tool: Fields, *, free_form: bool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.text("name")}
    if tool.get("description") is not None:
        function["description"] = tool.text("description")
    function["parameters"] = _FREE_FORM if free_form else tool.child("parameters").data
    return {"type": "function", "function": function}


def _options(fields: Fields) -> Options:
    top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS) or 0
    wants = "message.output_text.logprobs" in fields.items("include")
    choice = fields.get("tool_choice")
    options = read_sampling(fields)
    options.max_tokens = fields.integer("max_output_tokens", 1, 2**31)
    options.stop = fields.stops("stop")
    options.logprobs, options.top_logprobs = wants, top if wants else 0
    options.structured = _structured(fields.child("text").child("format"))
    options.tool_calls = choice != "none"
    options.forced = _forced(fields, choice)
    options.parallel_calls = fields.flag("parallel_tool_calls", True)
    return options


def _forced(fields: Fields, choice: Any) -> ForcedCall | None:
    if choice in (None, "auto", "none"):
        return None
    if choice == "required":
        return ForcedCall()
    named = fields.child("tool_choice")
    if named.text("type") in ("function", "custom"):
        return ForcedCall(named.text("name"))
    raise fields.refuse("tool_choice", "auto, none, required or a function's name")


def _structured(fields: Fields) -> dict[str, Any] | None:
    kind = fields.text("type", "text")
    if kind == "json_schema":
        schema = fields.get("schema")
        if not isinstance(schema, dict):
            raise fields.refuse("schema", "a JSON schema")
        return {"json": schema}
    if kind == "json_object":
        return json_object(fields)
    if kind == "text":
        return None
    raise fields.refuse("type", "text, json_object or json_schema")
