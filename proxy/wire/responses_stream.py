"""Writes answers for Responses: the output items, and the events of a stream.

Invariant: the `response.completed` event of a stream has the items of the whole body.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import orjson

from proxy.conversation import ToolCall
from proxy.conversation.free_form import free_text
from proxy.conversation.references import AnswerPart, unknown_item
from proxy.errors import ProxyError
from proxy.records import FinishReason
from proxy.rendering.deltas import (
    Delta,
    ReasoningDelta,
    ResultDelta,
    TextDelta,
    ToolCallStart,
)
from proxy.wire.chat import openai_error
from proxy.wire.client_tools import CLIENT_TOOLS, client_item
from proxy.wire.dialect import Call, Outcome, Piece, SampledToken
from proxy.wire.provided import result_item

Item = dict[str, Any]
SUMMARY_MARK = "agentic-proxy:"
"""Begins the content of the compaction items that this proxy has made."""


def response_id(answer_id: str, turn: int) -> str:
    return f"resp_{turn}_{answer_id}"


def item_id(kind: str, answer_id: str, turn: int) -> str:
    """The id of an answer's reasoning (`rs`) or text (`msg`) item; `answer_part` parses it."""
    return f"{kind}_{turn}_{answer_id}"


def answer_part(item: str) -> AnswerPart:
    """The part of a recorded answer that an item id names. Raises RequestError (404)."""
    found = _ITEM_ID.fullmatch(item)
    if found is None:
        raise unknown_item(item)
    if found["call"] is not None:
        turn, call = int(found["call_turn"]), int(found["call"])
        return AnswerPart(item, turn, "call", call, found["call_id"])
    part: Literal["text", "reasoning"] = "text" if found["text"] == "msg" else "reasoning"
    return AnswerPart(item, int(found["turn"]), part)


_ITEM_ID = re.compile(
    r"(?:(?P<text>rs|msg)_(?P<turn>[0-9]{1,9})_[0-9a-f]+"
    r"|fc_(?P<call_turn>[0-9]{1,9})_(?P<call>[0-9]{1,4})_(?P<call_id>.*))",
    re.DOTALL,
)


def response_object(call: Call, outcome: Outcome | None, output: list[Item]) -> dict[str, Any]:
    """The `response` object; its status is `in_progress` while `outcome` is None."""
    status, details = "in_progress", None
    if outcome is not None:
        truncated = outcome.finish_reason is FinishReason.LENGTH
        status = "incomplete" if truncated else "completed"
        details = {"reason": "max_output_tokens"} if truncated else None
    return {
        "id": call.extra["id"],
        "object": "response",
        "created_at": call.extra["created"],
        "status": status,
        "error": None,
        "incomplete_details": details,
        "instructions": None,
        "metadata": {},
        "model": call.model,
        "output": output,
        "parallel_tool_calls": call.options.parallel_calls,
        "previous_response_id": call.extra["previous"],
        "temperature": call.options.temperature,
        "top_p": call.options.top_p,
        "tool_choice": "auto",
        "tools": [],
        "usage": None if outcome is None else _usage(outcome),
    }


def output_items(call: Call, answer_id: str, outcome: Outcome) -> list[Item]:
    call.extra["id"] = response_id(answer_id, outcome.turn)
    if call.extra.get("compacting"):
        return [_compaction_item(answer_id, outcome)]
    parts = [*outcome.before, outcome]
    return [item for part in parts for item in _items(call, answer_id, part)]


def _items(call: Call, answer_id: str, outcome: Outcome) -> list[Item]:
    message = outcome.message
    items = []
    if message.reasoning:
        items.append(_reasoning_item(item_id("rs", answer_id, outcome.turn), message.reasoning))
    if message.text or not message.tool_calls:
        message_id = item_id("msg", answer_id, outcome.turn)
        items.append(_message_item(message_id, message.text, outcome.tokens))
    calls = [
        call_item(call, tool_call, outcome.turn, position)
        for position, tool_call in enumerate(message.tool_calls)
        if tool_call.name not in call.provider_tools
    ]
    return [*items, *calls, *(_result_item(call, each, outcome.turn) for each in outcome.results)]


def _result_item(call: Call, result: ResultDelta, turn: int) -> Item:
    with_outputs = bool(call.extra["outputs"])
    return result_item(result, turn, call.provider_tools, with_outputs=with_outputs)


def call_item(call: Call, tool_call: ToolCall, turn: int, position: int) -> Item:
    """The item for a tool call, of the kind that the agent declared. `position` is the call's index
    among the calls of the answer."""
    kind = call.extra["kinds"].get(tool_call.name, "")
    call_id = tool_call.id
    head = {"id": f"fc_{turn}_{position}_{call_id}", "call_id": call_id, "status": "completed"}
    if kind in CLIENT_TOOLS:
        own = client_item(kind, tool_call)
        if own is not None:
            return {**head, **own}
    if kind.partition(":")[0] == "custom":
        space = kind.partition(":")[2]
        named = {"name": tool_call.name.removeprefix(f"{space}.") if space else tool_call.name}
        named |= {"namespace": space} if space else {}
        text = free_text(tool_call.arguments)
        return {**head, "type": "custom_tool_call", **named, "input": text}
    item = {
        **head,
        "type": "function_call",
        "name": tool_call.name,
        "arguments": tool_call.arguments,
    }
    if kind.startswith("namespace:"):
        space = kind.removeprefix("namespace:")
        item["namespace"] = space
        item["name"] = tool_call.name.removeprefix(space + ".")
    return item


class ResponsesWriter:
    """Writes the events of one streamed response, numbered in order."""

    def __init__(self, call: Call, answer_id: str) -> None:
        self._call = call
        self._id = answer_id
        self._turn = 0
        self._calls = 0
        self._sequence = 0
        self._output: list[Item] = []
        self._answer_at = 0
        """Where in it the items of the answer begin that is being sent."""
        self._open: Item | None = None
        self._text = ""
        """Text or arguments of the open item so far."""
        self._call_open: ToolCall | None = None
        self._tokens: list[SampledToken] = []

    def start(self, prompt_tokens: int, turn: int) -> bytes:
        self._turn = turn
        self._call.extra["id"] = response_id(self._id, turn)
        response = response_object(self._call, None, [])
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def piece(self, piece: Piece) -> bytes:
        self._tokens += piece.tokens
        self._turn = piece.turn
        if self._call.extra.get("compacting"):  # its one item is sent when it is complete
            return b""
        texts = [at for at, delta in enumerate(piece.deltas) if isinstance(delta, TextDelta)]
        events: list[bytes] = []
        if piece.tokens and not texts:
            events += self._delta(TextDelta(""), piece.tokens)
        for at, delta in enumerate(piece.deltas):
            last = texts and at == texts[-1]
            events += self._delta(delta, piece.tokens if last else ())
        return b"".join(events)

    def end(self, outcomes: Sequence[Outcome]) -> bytes:
        outcome = outcomes[0]
        self._call.extra["id"] = response_id(self._id, outcome.turn)
        events = []
        if self._call.extra.get("compacting"):
            (item,) = output_items(self._call, self._id, outcome)
            events += [self._event("response.output_item.added", output_index=0, item=item)]
            events += [self._done(item)]
        elif not outcome.message.text and not outcome.message.tool_calls:
            events += list(self._enter(_message_item(self._item_id("msg"), "", [])))
        events += list(self._close())
        response = response_object(self._call, outcome, self._output)
        events.append(self._event(f"response.{response['status']}", response=response))
        return b"".join(events)

    def error(self, error: ProxyError) -> bytes:
        failed = orjson.loads(openai_error(error))["error"]
        response = response_object(self._call, None, self._output)
        response["status"] = "failed"
        code = failed["code"] or "server_error"
        response["error"] = {"code": code, "message": failed["message"]}
        return self._event("response.failed", response=response)

    def _delta(self, delta: Delta, tokens: Sequence[SampledToken] = ()) -> Iterator[bytes]:
        """`tokens` are those of a text's delta."""
        if isinstance(delta, TextDelta):
            text, again = delta.text, self._has_message
            yield from self._enter(_message_item(self._item_id("msg"), "", []))
            if again and not self._text:  # `normalised` joins by a line break
                text = text.removeprefix("\n")
            self._text += text
            yield self._part("response.output_text.delta", delta=text, logprobs=_scored(tokens))
        elif isinstance(delta, ReasoningDelta):
            yield from self._enter(_reasoning_item(self._item_id("rs"), ""))
            self._text += delta.text
            yield self._part("response.reasoning_text.delta", delta=delta.text)
        elif isinstance(delta, ToolCallStart):
            yield from self._close()
            yield from self._enter_call(ToolCall(delta.id, delta.name, ""))
        elif isinstance(delta, ResultDelta):
            yield from self._close()
            yield from self._result(delta)
            self._calls, self._answer_at = 0, self._at
            self._text, self._tokens = "", []
        elif self._call_open is not None:
            self._text += delta.text
            if self._open is not None and self._open["type"] == "function_call":
                yield self._call_event("arguments.delta", delta=delta.text)

    def _enter(self, item: Item) -> Iterator[bytes]:
        if self._open is not None and self._open["type"] == item["type"]:
            return
        yield from self._close()
        self._open, self._text = item, ""
        begun = {**item, "status": "in_progress", "content": []}
        yield self._event("response.output_item.added", output_index=self._at, item=begun)
        yield self._part("response.content_part.added", part=item["content"][0])

    def _enter_call(self, call: ToolCall) -> Iterator[bytes]:
        self._call_open, self._text = call, ""
        if call.name in self._call.provider_tools:
            return  # its item is sent with its result
        if self._call.extra["kinds"].get(call.name) in CLIENT_TOOLS:
            return  # the form of its item depends on the arguments
        self._open = call_item(self._call, call, self._turn, self._calls)
        begun = {**self._open, "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=self._at, item=begun)

    def _close(self) -> Iterator[bytes]:
        if self._call_open is not None:
            yield from self._close_call(self._call_open)
            return
        if self._open is None:
            return
        if self._open["type"] == "message":
            item = _message_item(self._open["id"], self._text, self._tokens)
            kind = "output_text"
        else:
            item = _reasoning_item(self._open["id"], self._text)
            kind = "reasoning_text"
        done: dict[str, Any] = {"text": self._text}
        if kind == "output_text":
            done["logprobs"] = _scored(self._tokens)
        yield self._part(f"response.{kind}.done", **done)
        yield self._part("response.content_part.done", part=item["content"][0])
        yield self._done(item)
        self._open = None

    def _close_call(self, call: ToolCall) -> Iterator[bytes]:
        """Ends a call. The input of a free-form tool is a value inside the arguments, so it is sent
        only when they are complete."""
        call.arguments = self._text
        if call.name in self._call.provider_tools:
            self._calls += 1
            self._call_open = None
            return
        item = call_item(self._call, call, self._turn, self._calls)
        self._calls += 1
        if self._open is None:
            self._open = item
            begun = {**item, "status": "in_progress"}
            yield self._event("response.output_item.added", output_index=self._at, item=begun)
        if item["type"] == "custom_tool_call":
            yield self._call_event("input.delta", delta=item["input"])
            yield self._call_event("input.done", input=item["input"])
        elif item["type"] == "function_call":
            yield self._call_event("arguments.done", arguments=item["arguments"])
        yield self._done(item)
        self._open = self._call_open = None

    def _result(self, result: ResultDelta) -> Iterator[bytes]:
        """The events of a call that the proxy has run."""
        item = _result_item(self._call, result, self._turn)
        kind, place = item["type"], {"item_id": item["id"], "output_index": self._at}
        code = item.get("code")
        begun = {**item, "status": "in_progress"} | ({} if code is None else {"code": ""})
        yield self._event("response.output_item.added", output_index=self._at, item=begun)
        yield self._event(f"response.{kind}.in_progress", **place)
        if code is None:
            yield self._event(f"response.{kind}.searching", **place)
        else:
            yield self._event(f"response.{kind}_code.delta", **place, delta=code)
            yield self._event(f"response.{kind}_code.done", **place, code=code)
            yield self._event(f"response.{kind}.interpreting", **place)
        yield self._event(f"response.{kind}.completed", **place)
        yield self._done(item)

    def _call_event(self, kind: str, **fields: Any) -> bytes:
        item = self._open or {}
        family = "custom_tool_call" if item["type"] == "custom_tool_call" else "function_call"
        place = {"item_id": item["id"], "output_index": self._at}
        return self._event(f"response.{family}_{kind}", **place, **fields)

    def _done(self, item: Item) -> bytes:
        event = self._event("response.output_item.done", output_index=self._at, item=item)
        self._output.append(item)
        return event

    def _item_id(self, kind: str) -> str:
        return item_id(kind, self._id, self._turn)

    @property
    def _has_message(self) -> bool:
        return any(item["type"] == "message" for item in self._output[self._answer_at :])

    @property
    def _at(self) -> int:
        return len(self._output)

    def _part(self, kind: str, **fields: Any) -> bytes:
        item_id = self._open["id"] if self._open is not None else ""
        return self._event(kind, item_id=item_id, output_index=self._at, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = orjson.dumps({"type": kind, "sequence_number": self._sequence, **fields})
        self._sequence += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


def _message_item(item_id: str, text: str, tokens: list[SampledToken]) -> Item:
    logprobs = _scored(tokens)
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
    return {
        "id": item_id,
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [part],
    }


def _scored(tokens: Sequence[SampledToken]) -> list[dict[str, Any]]:
    return [
        {
            "token": token.text,
            "logprob": token.logprob,
            "bytes": list(token.text.encode()),
            "top_logprobs": [
                {"token": other, "logprob": value, "bytes": list(other.encode())}
                for other, value in token.top
            ],
        }
        for token in tokens
    ]


def _compaction_item(answer_id: str, outcome: Outcome) -> Item:
    """What an agent keeps of a compacted conversation. Its content is the model's summary."""
    content = SUMMARY_MARK + outcome.message.text
    return {
        "id": item_id("cmp", answer_id, outcome.turn),
        "type": "compaction",
        "encrypted_content": content,
    }


def _reasoning_item(item_id: str, text: str) -> Item:
    return {
        "id": item_id,
        "type": "reasoning",
        "summary": [],
        "status": "completed",
        "content": [{"type": "reasoning_text", "text": text}],
    }


def _usage(outcome: Outcome) -> dict[str, Any]:
    return {
        "input_tokens": outcome.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": outcome.cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": outcome.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": outcome.reasoning_tokens},
        "total_tokens": outcome.prompt_tokens + outcome.completion_tokens,
    }
