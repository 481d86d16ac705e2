"""Anthropic Messages: `POST /v1/messages`, and the conversation of `/v1/messages/count_tokens`.

Accepts system text at the top level and inside `messages`, content as text or blocks, and tool
results and text in one user message. `thinking`, `context_management`, `metadata` and
`cache_control` are accepted and do not change what is sampled.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import orjson

from proxy.conversation.images import joined_blocks
from proxy.conversation.messages import (
    Conversation,
    Message,
    ToolCall,
    arguments_object,
    normalised,
)
from proxy.errors import ContextOverflow, ProxyError
from proxy.records import FinishReason
from proxy.rendering.deltas import (
    Delta,
    ReasoningDelta,
    ResultDelta,
    TextDelta,
    ToolCallStart,
)
from proxy.wire.client_tools import family, messages_function
from proxy.wire.dialect import (
    Call,
    ForcedCall,
    Headers,
    Options,
    Outcome,
    Piece,
    read_sampling,
)
from proxy.wire.fields import Fields, only_provider_tools
from proxy.wire.known_fields import unknown_fields
from proxy.wire.provided import (
    RESULT_BLOCKS,
    block_result,
    offered_functions,
    provider_tools,
    result_block,
)
from proxy.wire.shown import block_text, joined

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class MessagesDialect:
    """The dialect of `/v1/messages`."""

    name = "messages"
    route = "messages"

    def parse(self, fields: Fields, headers: Headers) -> Call:
        call = Call(
            model=fields.text("model", ""),
            conversation=parse_conversation(fields),
            options=_options(fields),
            stream=fields.flag("stream"),
            provider_tools=provider_tools(fields.items("tools")),
            unknown=unknown_fields(fields, MessagesDialect.name),
        )
        thinking = fields.child("thinking").text("type", "disabled")
        call.extra["thinking"] = thinking in ("enabled", "adaptive")
        return call

    def whole(self, call: Call, answer_id: str, outcomes: Sequence[Outcome]) -> bytes:
        outcome = outcomes[0]
        parts = [*outcome.before, outcome]
        content = [block for part in parts for block in _blocks(call, part)]
        return orjson.dumps(
            {
                **_head(call, answer_id),
                "content": content,
                "stop_reason": _stop_reason(outcome),
                "stop_sequence": outcome.stop_string,
                "usage": _usage(outcome),
            }
        )

    def writer(self, call: Call, answer_id: str) -> MessagesWriter:
        return MessagesWriter(call, answer_id)

    def error(self, error: ProxyError) -> bytes:
        message = error.message
        if isinstance(error, ContextOverflow):
            message = (
                f"prompt is too long: {error.prompt_tokens} tokens > {error.max_tokens} maximum"
            )
        kind = _ERROR_TYPES.get(error.status, "api_error")
        return orjson.dumps({"type": "error", "error": {"type": kind, "message": message}})


class MessagesWriter:
    """Writes the events of one streamed response.

    A content block is opened by its first delta and closed by the next block or by the end.
    """

    def __init__(self, call: Call, answer_id: str) -> None:
        self._call = call
        self._id = answer_id
        self._blocks = 0
        self._open: type[Delta] | None = None
        self._has_text = False

    def start(self, prompt_tokens: int, turn: int) -> bytes:
        usage = {"input_tokens": prompt_tokens, "output_tokens": 0}
        message = {
            **_head(self._call, self._id),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        return _event("message_start", message=message)

    def piece(self, piece: Piece) -> bytes:
        return b"".join(event for delta in piece.deltas for event in self._delta(delta))

    def end(self, outcomes: Sequence[Outcome]) -> bytes:
        outcome = outcomes[0]
        stop = {"stop_reason": _stop_reason(outcome), "stop_sequence": outcome.stop_string}
        return b"".join(
            [
                *self._close(),
                _event("message_delta", delta=stop, usage=_usage(outcome)),
                _event("message_stop"),
            ]
        )

    def error(self, error: ProxyError) -> bytes:
        return b"event: error\ndata: " + MessagesDialect().error(error) + b"\n\n"

    def _delta(self, delta: Delta) -> Iterator[bytes]:
        if isinstance(delta, TextDelta):
            text, again = delta.text, self._has_text and self._open is not TextDelta
            text = text.removeprefix("\n") if again else text  # `parse_conversation` joins by it
            self._has_text = True
            yield from self._enter(TextDelta, {"type": "text", "text": ""})
            yield self._content({"type": "text_delta", "text": text})
        elif isinstance(delta, ReasoningDelta):
            if self._call.extra["thinking"]:
                block = {"type": "thinking", "thinking": "", "signature": ""}
                yield from self._enter(ReasoningDelta, block)
                yield self._content({"type": "thinking_delta", "thinking": delta.text})
        elif isinstance(delta, ToolCallStart):
            yield from self._close()
            block = _tool_use(ToolCall(delta.id, delta.name, ""), self._call)
            yield from self._enter(ToolCallStart, {**block, "input": {}})
        elif isinstance(delta, ResultDelta):
            yield from self._close()
            yield from self._enter(ResultDelta, result_block(delta))
            yield from self._close()
            self._has_text = False
        else:
            yield self._content({"type": "input_json_delta", "partial_json": delta.text})

    def _enter(self, kind: type[Delta], block: dict[str, Any]) -> Iterator[bytes]:
        if self._open is kind:
            return
        yield from self._close()
        self._open = kind
        yield _event("content_block_start", index=self._blocks, content_block=block)

    def _content(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._blocks, delta=delta)

    def _close(self) -> Iterator[bytes]:
        if self._open is not None:
            yield _event("content_block_stop", index=self._blocks)
            self._open = None
            self._blocks += 1


def parse_conversation(fields: Fields) -> Conversation:
    """Raises RequestError."""
    messages: list[Message] = []
    system = _texts(fields, "system")
    if system:
        messages.append(Message("system", system))
    tools = [tool for tool in fields.items("tools") if isinstance(tool, dict)]
    referable = {tool["name"]: tool for tool in tools if isinstance(tool.get("name"), str)}
    provided = provider_tools(fields.items("tools"))
    for item in fields.objects("messages"):
        messages += _parse_message(item, referable, provided)
    if not messages:
        raise fields.refuse("messages", "at least one message")
    messages = normalised(messages)
    tools, deferred = parse_tools(fields)
    prefill = _prefill(fields, messages)
    return Conversation(messages, tools, deferred=deferred, prefill=prefill)


def _prefill(fields: Fields, messages: list[Message]) -> str | None:
    """Removes a final assistant message, whose text the answer continues; None if it is empty or
    there is none."""
    last = messages[-1]
    if last.role != "assistant":
        return None
    if last.tool_calls or len(messages) == 1:
        raise fields.refuse(
            "messages",
            "a user message first, and a tool_result for each tool_use of the last message",
        )
    return messages.pop().text or None


def _parse_message(
    fields: Fields, tools: Mapping[Any, dict[str, Any]], provided: Collection[str]
) -> list[Message]:
    """`provided`: functions that the proxy runs, whose uses are calls for the model, not text."""
    role = fields.text("role")
    if role == "assistant":
        return _parse_assistant(fields, provided)
    if role == "system":
        return [Message("system", _texts(fields, "content"))]
    if role != "user":
        raise fields.refuse("role", "user, assistant or system")
    if isinstance(fields.get("content"), str):
        return [Message("user", fields.text("content"))]
    results, texts = [], []
    for block in fields.objects("content"):
        if block.text("type", "text") == "tool_result":
            call_id = block.text("tool_use_id", "")
            results.append(Message("tool", _result(block, tools), tool_call_id=call_id))
        else:
            texts.append(block_text(block))
    if texts or not results:
        results.append(Message("user", joined_blocks(texts)))
    return results


def _parse_assistant(fields: Fields, provided: Collection[str]) -> list[Message]:
    """One message, and more where the proxy has run calls: what follows their results is another
    answer."""
    if isinstance(fields.get("content"), str):
        return [Message("assistant", fields.text("content"))]
    out: list[Message] = []
    blocks: list[Fields] = []
    for block in fields.objects("content"):
        if RESULT_BLOCKS.get(block.text("type", "text")) in provided:
            if blocks:
                out.append(_answer(blocks, provided))
            blocks = []
            call_id = block.text("tool_use_id", "")
            out.append(Message("tool", block_result(block), tool_call_id=call_id))
        else:
            blocks.append(block)
    return [*out, _answer(blocks, provided)] if blocks or not out else out


def _answer(blocks: list[Fields], provided: Collection[str]) -> Message:
    message = Message("assistant")
    texts, thoughts = [], []
    for block in blocks:
        kind = block.text("type", "text")
        is_provided = kind == "server_tool_use" and str(block.get("name")) in provided
        if kind == "tool_use" or is_provided:
            given = block.get("input")
            # Text is a call that the agent could not read, as it was sampled.
            arguments = given if isinstance(given, str) else orjson.dumps(given or {}).decode()
            call = ToolCall(block.text("id", ""), block.text("name", ""), arguments)
            message.tool_calls.append(call)
        elif kind == "thinking":
            thoughts.append(block.text("thinking", ""))
        elif kind == "compaction":
            message.compacted = True
            texts.append(block.optional_text("content") or block_text(block))
        elif kind != "redacted_thinking":
            texts.append(block_text(block))
    message.text = joined_blocks(filter(None, texts))
    message.reasoning = "\n".join(thoughts) or None
    return message


def _result(fields: Fields, tools: Mapping[Any, dict[str, Any]]) -> str:
    """The text of a tool's result. A reference to a tool, which a tool search has found, is shown
    as the tool's definition."""
    if not isinstance(fields.get("content"), list):
        return _texts(fields, "content")
    texts = []
    for block in fields.objects("content"):
        found = tools.get(block.quoted("tool_name")) if _is_reference(block) else None
        if found is not None:
            shown = {name: found[name] for name in _SHOWN_OF_TOOL if name in found}
            texts.append(orjson.dumps(shown).decode())
        elif _is_reference(block):
            texts.append(f"[tool: {block.quoted('tool_name')[:200]}]")
        else:
            texts.append(block_text(block))
    return joined_blocks(texts)


_SHOWN_OF_TOOL = ("name", "description", "input_schema")


def _is_reference(block: Fields) -> bool:
    return bool(block.get("type") == "tool_reference")


def _texts(fields: Fields, name: str) -> str:
    """Text from a string or from blocks."""
    return joined(fields, name)


def parse_tools(fields: Fields) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The functions for the model: those of its prompt, and those that it learns of by a tool
    search (`defer_loading`). Raises RequestError if there are only tools that nobody runs here."""
    offered: list[dict[str, Any]] = []
    deferred: list[dict[str, Any]] = []
    for tool in fields.objects("tools"):
        late = tool.get("defer_loading") is True
        functions = [{"type": "function", "function": each} for each in _functions(tool)]
        (deferred if late else offered).extend(functions)
    if fields.items("tools") and not offered and not deferred:
        raise only_provider_tools(fields)
    return offered, deferred


def _functions(tool: Fields) -> list[dict[str, Any]]:
    """None for a tool that nobody runs here; the model does not see it."""
    kind = tool.text("type", "custom")
    if kind != "custom":
        name = tool.get("name")
        function = messages_function(
            kind, name if isinstance(name, str) else family(kind), tool.data
        )
        functions = offered_functions(kind, tool.backends) if function is None else [function]
        if not functions:
            tool.note("tools_left_out", kind)
        return functions
    function = {"name": tool.text("name")}
    if tool.get("description") is not None:
        function["description"] = tool.text("description")
    function["parameters"] = tool.child("input_schema").data
    return [function]


def _options(fields: Fields) -> Options:
    choice = fields.child("tool_choice")
    kind = choice.text("type", "auto")
    if kind not in ("auto", "any", "tool", "none"):
        raise choice.refuse("type", "auto, any, tool or none")
    options = read_sampling(fields)
    options.stop = fields.stops("stop_sequences")
    options.structured = _structured(fields)
    options.tool_calls = kind != "none"
    options.forced = _forced(choice, kind)
    options.parallel_calls = not choice.flag("disable_parallel_tool_use")
    return options


def _structured(fields: Fields) -> dict[str, Any] | None:
    """`output_config.format`, or `output_format`, its name before."""
    config = fields.child("output_config")
    place, name = (config, "format") if config.get("format") else (fields, "output_format")
    if place.get(name) is None:
        return None
    wanted = place.child(name)
    if wanted.text("type") != "json_schema":
        raise wanted.refuse("type", "json_schema")
    if not isinstance(wanted.get("schema"), dict):
        raise wanted.refuse("schema", "a JSON schema")
    return {"json": wanted.child("schema").data}


def _forced(choice: Fields, kind: str) -> ForcedCall | None:
    if kind == "any":
        return ForcedCall()
    return ForcedCall(choice.text("name")) if kind == "tool" else None


def _head(call: Call, answer_id: str) -> dict[str, Any]:
    return {
        "id": f"msg_{answer_id}",
        "type": "message",
        "role": "assistant",
        "model": call.model,
    }


def _blocks(call: Call, outcome: Outcome) -> Iterator[dict[str, Any]]:
    message = outcome.message
    if message.reasoning and call.extra["thinking"]:
        yield {"type": "thinking", "thinking": message.reasoning, "signature": ""}
    if message.text:
        yield {"type": "text", "text": message.text}
    for each in message.tool_calls:
        yield {**_tool_use(each, call), "input": arguments_object(each)}
    yield from map(result_block, outcome.results)


def _tool_use(tool_call: ToolCall, call: Call) -> dict[str, Any]:
    kind = "server_tool_use" if tool_call.name in call.provider_tools else "tool_use"
    return {"type": kind, "id": tool_call.id, "name": tool_call.name}


def _stop_reason(outcome: Outcome) -> str:
    if outcome.stop_string is not None:
        return "stop_sequence"
    if outcome.finish_reason is FinishReason.TOOL_CALLS:
        ran_all = len(outcome.results) == len(outcome.message.tool_calls) > 0
        return "pause_turn" if ran_all else "tool_use"
    return "max_tokens" if outcome.finish_reason is FinishReason.LENGTH else "end_turn"


def _usage(outcome: Outcome) -> dict[str, int]:
    return {
        "input_tokens": outcome.prompt_tokens - outcome.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": outcome.cached_tokens,
        "output_tokens": outcome.completion_tokens,
    }


def _event(kind: str, **fields: Any) -> bytes:
    data = orjson.dumps({"type": kind, **fields})
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"
