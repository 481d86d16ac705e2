"""OpenAI Chat Completions: `POST /v1/chat/completions`.

Accepts what agents send in practice: developer messages, content as text or blocks, split assistant
turns, `cache_control`, and reasoning under either of its two names. Refuses only parameters that
would change the sampling and that the proxy does not support.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from proxy.conversation.free_form import FREE_FORM, free_arguments, free_text
from proxy.conversation.images import joined_blocks
from proxy.conversation.messages import Conversation, Message, Role, ToolCall, normalised
from proxy.errors import ContextOverflow, ProxyError, RequestError
from proxy.records import FinishReason
from proxy.rendering.deltas import (
    Delta,
    ReasoningDelta,
    ResultDelta,
    TextDelta,
    ToolCallStart,
)
from proxy.wire.dialect import (
    Call,
    ForcedCall,
    Headers,
    Options,
    Outcome,
    Piece,
    SampledToken,
    error_type,
    read_sampling,
)
from proxy.wire.fields import Fields, only_provider_tools
from proxy.wire.known_fields import unknown_fields
from proxy.wire.shown import block_text, joined

MAX_CHOICES = 64
MAX_TOP_LOGPROBS = 20
_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


class ChatDialect:
    """The dialect of `/v1/chat/completions`."""

    name = "chat"
    route = "chat/completions"

    def parse(self, fields: Fields, headers: Headers) -> Call:
        tools, kinds = parse_tools(fields)
        messages = normalised(parse_messages(fields))
        if not messages:
            raise fields.refuse("messages", "at least one message")
        stream_options = fields.child("stream_options") if "stream_options" in fields.data else None
        return Call(
            model=fields.text("model", ""),
            conversation=Conversation(messages, tools, prefill=_prefill(fields, messages)),
            options=parse_options(fields),
            n=fields.integer("n", 1, MAX_CHOICES) or 1,
            stream=fields.flag("stream"),
            free_form=frozenset(kinds),
            extra={
                "usage": stream_options is not None and stream_options.flag("include_usage"),
                "token_ids": fields.flag("return_token_ids"),
                "kinds": kinds,
            },
            unknown=unknown_fields(fields, ChatDialect.name),
        )

    def whole(self, call: Call, answer_id: str, outcomes: Sequence[Outcome]) -> bytes:
        choices = [_choice(i, outcome, call) for i, outcome in enumerate(outcomes)]
        body = {
            "id": f"chatcmpl-{answer_id}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": call.model,
            "choices": choices,
            "usage": usage(outcomes),
        }
        if call.extra.get("token_ids"):
            _add_token_ids(body, outcomes)
        return orjson.dumps(body)

    def writer(self, call: Call, answer_id: str) -> ChatWriter:
        return ChatWriter(call, answer_id)

    def error(self, error: ProxyError) -> bytes:
        return openai_error(error)


class ChatWriter:
    """Writes the chunks of one streamed response."""

    def __init__(self, call: Call, answer_id: str) -> None:
        self._call = call
        head = {
            "id": f"chatcmpl-{answer_id}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": call.model,
        }
        self._begin = b"data: " + orjson.dumps(head)[:-1]
        self._kinds: Mapping[str, str] = call.extra.get("kinds", {})
        self._held: dict[tuple[int, int], ToolCall] = {}
        """Free-form calls whose arguments are not complete, by choice and index. Their input is a
        value inside the arguments."""

    def start(self, prompt_tokens: int, turn: int) -> bytes:
        role = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(i, role) for i in range(self._call.n))

    def piece(self, piece: Piece) -> bytes:
        texts = [at for at, delta in enumerate(piece.deltas) if isinstance(delta, TextDelta)]
        chunks = []
        logprobs = _logprobs(piece.tokens) if piece.tokens else None
        if logprobs is not None and not texts:
            chunks.append(self._chunk(piece.choice, {"content": ""}, logprobs=logprobs))
        for at, delta in enumerate(piece.deltas):
            said = logprobs if texts and at == texts[-1] else None
            chunks += [
                self._chunk(piece.choice, each, logprobs=said)
                for each in self._deltas(piece.choice, delta)
            ]
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def end(self, outcomes: Sequence[Outcome]) -> bytes:
        chunks = list(self._held_chunks()) if self._held else []
        chunks += [
            self._chunk(i, {}, finish_reason=outcome.finish_reason)
            for i, outcome in enumerate(outcomes)
        ]
        if self._call.extra.get("usage"):
            chunks.append(self._event([], usage=usage(outcomes)))
        return b"".join([*chunks, b"data: [DONE]\n\n"])

    def error(self, error: ProxyError) -> bytes:
        return b"data: " + openai_error(error) + b"\n\n"

    def _deltas(self, choice: int, delta: Delta) -> Iterator[dict[str, Any]]:
        if isinstance(delta, TextDelta):
            yield {"content": delta.text}
        elif isinstance(delta, ReasoningDelta):
            yield {"reasoning_content": delta.text}
        elif isinstance(delta, ToolCallStart):
            call = ToolCall(delta.id, delta.name, "")
            if delta.name in self._kinds:
                self._held[choice, delta.index] = call
            else:
                yield {"tool_calls": [{"index": delta.index, **_call(call, {})}]}
        elif isinstance(delta, ResultDelta):
            return  # of the other dialects: the tools of this one are all the agent's
        elif (held := self._held.get((choice, delta.index))) is not None:
            held.arguments += delta.text
        else:
            yield {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}

    def _held_chunks(self) -> Iterator[bytes]:
        for (choice, index), call in self._held.items():
            calls = [{"index": index, **_call(call, self._kinds)}]
            yield self._chunk(choice, {"tool_calls": calls})

    def _chunk(
        self,
        choice: int,
        delta: dict[str, Any],
        *,
        finish_reason: FinishReason | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        entry = {
            "index": choice,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return self._event([entry])

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        """The fields that all chunks have in common are encoded once."""
        return b"%b,%b\n\n" % (self._begin, orjson.dumps({"choices": choices, **more})[1:])


def parse_messages(fields: Fields) -> list[Message]:
    """Parses `messages`. The most frequent form takes a short path, because agents send the whole
    history with every call."""
    messages: list[Message] = []
    for item in fields.items("messages"):
        try:
            role, content = _ROLES[item["role"]], item["content"]
        except (KeyError, TypeError):
            content = None
        if type(content) is str and len(item) == 2:
            messages.append(Message(role, content))
        else:
            messages.append(parse_message(Fields(item, fields, "messages", len(messages))))
    return messages


def parse_message(fields: Fields) -> Message:
    name = fields.text("role")
    role = _ROLES.get(name)
    if role is None:
        raise fields.refuse("role", f"one of {', '.join(_ROLES)}")
    if role == "assistant":
        message = _parse_assistant(fields)
        reasoning = fields.get("reasoning_content") or fields.get("reasoning")
        message.reasoning = reasoning if isinstance(reasoning, str) else message.reasoning
        message.tool_calls = [_parse_call(call) for call in fields.objects("tool_calls")]
        legacy = fields.get("function_call")
        if legacy is not None:
            function = Fields(legacy, fields, "function_call")
            message.tool_calls.append(_function(function, function.text("name", "")))
        refused = fields.optional_text("refusal")
        message.text = message.text or refused or ""
        return message
    message = Message(role, parse_content(fields, "content"))
    if role == "tool":
        message.tool_call_id = fields.optional_text("tool_call_id") or fields.optional_text("name")
    return message


def _parse_assistant(fields: Fields) -> Message:
    """Text and reasoning of an assistant's content. Some agents send Anthropic's blocks here."""
    if not isinstance(fields.get("content"), list):
        return Message("assistant", parse_content(fields, "content"))
    texts, thoughts = [], []
    for at, block in enumerate(fields.items("content")):
        held = Fields(
            {"type": "text", "text": block} if isinstance(block, str) else block,
            fields,
            "content",
            at,
        )
        kind = held.text("type", "text")
        if kind in ("thinking", "reasoning"):
            thoughts.append(held.text("thinking" if kind == "thinking" else "text", ""))
        elif kind not in ("redacted_thinking", "tool_use"):
            texts.append(block_text(held))
    return Message("assistant", joined_blocks(texts), "\n".join(thoughts) or None)


def parse_content(fields: Fields, name: str) -> str:
    """Text from a string or from blocks; see `shown` for those that are not text."""
    return joined(fields, name)


def parse_tools(fields: Fields) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The functions for the model, and `custom` by name for those that are free-form on the wire.

    With `tool_choice.allowed_tools` only these are offered. Raises RequestError if there are only
    tools that nobody runs here."""
    tools: list[dict[str, Any]] = []
    kinds: dict[str, str] = {}
    if "tools" not in fields.data:
        return tools, kinds
    for tool in fields.objects("tools"):
        kind = tool.text("type", "function")
        if kind not in ("function", "custom"):
            tool.note("tools_left_out", kind)
            continue
        function = tool.child(kind)
        name = function.text("name")
        kept = {key: value for key, value in function.data.items() if key != "cache_control"}
        if kind == "custom":
            kinds[name] = kind
            words = {"description": kept["description"]} if "description" in kept else {}
            kept = {"name": name, **words, "parameters": FREE_FORM}
        tools.append({"type": "function", "function": kept})
    if fields.items("tools") and not tools:
        raise only_provider_tools(fields)
    choice = fields.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = _allowed(fields)
        tools = [tool for tool in tools if tool["function"]["name"] in allowed]
    return tools, kinds


def _allowed(fields: Fields) -> set[str]:
    named = fields.child("tool_choice").child("allowed_tools").objects("tools")
    return {each.child(each.text("type", "function")).text("name") for each in named}


def parse_options(fields: Fields) -> Options:
    max_tokens = fields.integer("max_completion_tokens", 1, 2**31)
    logprobs = fields.flag("logprobs")
    top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS) or 0
    options = parse_sampling(fields)
    options.max_tokens = max_tokens or options.max_tokens
    options.logprobs, options.top_logprobs = logprobs, top if logprobs else 0
    options.every_token = fields.flag("return_token_ids")
    if "tool_choice" in fields.data:
        options.tool_calls = _choice_kind(fields) != "none"
        options.forced = _forced(fields)
    options.parallel_calls = fields.flag("parallel_tool_calls", True)
    return options


def parse_sampling(fields: Fields) -> Options:
    """The options that Chat Completions and Completions have in common."""
    options = read_sampling(fields)
    if "stop" in fields.data:
        options.stop = fields.stops("stop")
    if "response_format" in fields.data:
        options.structured = _structured(fields.child("response_format"))
    return options


def usage(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    prompt = outcomes[0].prompt_tokens if outcomes else 0
    completion = sum(outcome.completion_tokens for outcome in outcomes)
    cached = outcomes[0].cached_tokens if outcomes else 0
    reasoning = sum(outcome.reasoning_tokens for outcome in outcomes)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


def openai_error(error: ProxyError) -> bytes:
    """OpenAI's error body. A context overflow has the wording on which agents compact their
    history."""
    message, param, code = error.message, None, None
    if isinstance(error, RequestError):
        param, code = error.param, error.code
    if isinstance(error, ContextOverflow):
        message = (
            f"This model's maximum context length is {error.max_tokens} tokens. However, your "
            f"messages resulted in {error.prompt_tokens} tokens. Please reduce the length of the "
            "messages."
        )
    kind = error_type(error.status)
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})


def sse(data: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


def _choice(index: int, outcome: Outcome, call: Call) -> dict[str, Any]:
    message = outcome.message
    entry: dict[str, Any] = {"role": "assistant", "content": message.text or None}
    if message.text or not message.tool_calls:
        entry["content"] = message.text
    if message.reasoning:
        entry["reasoning_content"] = message.reasoning
    if message.tool_calls:
        kinds = call.extra.get("kinds", {})
        entry["tool_calls"] = [_call(tool_call, kinds) for tool_call in message.tool_calls]
    return {
        "index": index,
        "message": entry,
        "logprobs": _logprobs(outcome.tokens) if call.options.logprobs else None,
        "finish_reason": outcome.finish_reason,
    }


def _add_token_ids(body: dict[str, Any], outcomes: Sequence[Outcome]) -> None:
    """Implements vLLM's `return_token_ids`, which terminus-2 uses. Not available in a stream."""
    for choice, outcome in zip(body["choices"], outcomes, strict=True):
        if outcome.prompt_ids is not None and outcome.sampled_ids is not None:
            body["prompt_token_ids"] = outcome.prompt_ids.tolist()
            choice["token_ids"] = outcome.sampled_ids.tolist()


def _call(call: ToolCall, kinds: Mapping[str, str]) -> dict[str, Any]:
    if call.name in kinds:
        custom = {"name": call.name, "input": free_text(call.arguments)}
        return {"id": call.id, "type": "custom", "custom": custom}
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _logprobs(tokens: Sequence[SampledToken]) -> dict[str, Any]:
    content = [
        {
            **_scored(token.text, token.logprob),
            "top_logprobs": [_scored(text, logprob) for text, logprob in token.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _scored(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _parse_call(fields: Fields) -> ToolCall:
    if fields.get("function") is not None:
        return _function(fields.child("function"), fields.text("id", ""))
    custom = fields.child("custom")
    arguments = free_arguments(custom.text("input", ""))
    return ToolCall(fields.text("id", ""), custom.text("name", ""), arguments)


def _function(function: Fields, call_id: str) -> ToolCall:
    arguments = function.get("arguments")
    if arguments is not None and not isinstance(arguments, str):
        arguments = orjson.dumps(arguments).decode()
    return ToolCall(call_id, function.text("name", ""), arguments or "")


def json_object(fields: Fields) -> dict[str, Any]:
    """The format `json_object`, with the `schema` that some servers take beside it."""
    schema = fields.child("schema").data
    return {"json": schema} if schema else {"json_object": True}


def _structured(fields: Fields) -> dict[str, Any] | None:
    kind = fields.text("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return json_object(fields)
    if kind == "json_schema":
        schema = fields.child("json_schema").get("schema")
        if not isinstance(schema, dict):
            raise fields.child("json_schema").refuse("schema", "a JSON schema")
        return {"json": schema}
    raise fields.refuse("type", "text, json_object or json_schema")


def _prefill(fields: Fields, messages: list[Message]) -> str | None:
    """The text that the answer continues, by vLLM's `continue_final_message`. Without that
    parameter a final assistant message is complete, as with OpenAI."""
    if not fields.flag("continue_final_message"):
        return None
    last = messages[-1]
    if last.role != "assistant" or last.tool_calls or not last.text or len(messages) == 1:
        raise fields.refuse(
            "continue_final_message", "false, or a last message with an assistant's text"
        )
    return messages.pop().text


def _choice_kind(fields: Fields) -> str:
    """`tool_choice` as a word; for an object its type, as other APIs send it."""
    choice = fields.get("tool_choice")
    if isinstance(choice, dict):
        kind = fields.child("tool_choice").text("type")
        if kind != "allowed_tools":
            return kind
        return fields.child("tool_choice").child("allowed_tools").text("mode", "auto")
    return fields.text("tool_choice", "auto")


def _forced(fields: Fields) -> ForcedCall | None:
    kind = _choice_kind(fields)
    if kind in ("auto", "none"):
        return None
    if kind in ("required", "any"):
        return ForcedCall()
    choice = fields.get("tool_choice")
    if kind in ("function", "custom", "tool") and isinstance(choice, dict):
        named = fields.child("tool_choice")
        held = named.get(kind)
        return ForcedCall((named.child(kind) if isinstance(held, dict) else named).text("name"))
    raise fields.refuse("tool_choice", "auto, none, required or a function's name")
