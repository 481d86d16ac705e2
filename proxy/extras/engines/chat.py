"""The client of a hosted model that accepts and returns messages: any OpenAI-compatible
`/v1/chat/completions`, such as OpenAI's, Anthropic's and Google's.

It gets the conversation instead of the prompt's ids, and its answer is rendered as the ids that the
proxy's own model would have sampled to give it, so that sessions with such a teacher can train that
model (`agentic-train sft`). Invariant: its answers are never trained by a policy-gradient loss. It
serves only EVAL sessions (the router sends it no call of a TRAIN session), and each of its tokens
is recorded with a log-probability of NaN, which trajectories refuse.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, Self

import msgspec
import orjson

from proxy.config import EngineConfig
from proxy.conversation.messages import Conversation, Message, ToolCall
from proxy.engines.http_engine import (
    Answer,
    Choice,
    EngineCall,
    HttpEngine,
    UnusableAnswer,
    answer_in,
    connection,
    finish_reason,
    posting,
)
from proxy.engines.protocol import Chunk, Sampling
from proxy.errors import RequestError
from proxy.extras.engines.text_only import check_sampling
from proxy.records import FinishReason
from proxy.rendering.answers import answer_ids
from proxy.rendering.rendering import Rendering

ROUTE = "/v1/chat/completions"
END_IDS = 4
"""Number of ids at the prompt's end that are compared with those of the conversation: enough to see
that an answer is not begun by the agent."""
_OPTIONAL = {
    "temperature": 1.0,
    "top_p": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "seed": None,
}
"""Parameters that are sent only when they differ from these neutral values, because some hosted
models refuse them."""


class _Function(msgspec.Struct, gc=False):
    name: str
    arguments: str = "{}"


class _Call(msgspec.Struct, gc=False):
    function: _Function
    id: str = ""


class _Said(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(Choice, gc=False):
    message: _Said = msgspec.field(default_factory=_Said)
    finish_reason: str | None = None


class _Answer(Answer, gc=False):
    choices: list[_Choice] = msgspec.field(default_factory=list)


_DECODER = msgspec.json.Decoder(_Answer)


class ChatEngine(HttpEngine):
    """Reports neither token ids nor versions, and returns each answer as a whole."""

    def __init__(self, url: str, *, rendering: Rendering, **more: Any) -> None:
        """`rendering` is that of the proxy's model."""
        post = posting(ROUTE, partial(encode, rendering), streams=False)
        super().__init__(url, post=post, decode=partial(decode, rendering), **more)
        self._info.text_only = True

    @classmethod
    def from_config(cls, config: EngineConfig, rendering: Rendering) -> Self:
        return cls(rendering=rendering, **connection(config))

    async def _learn(self) -> None:
        """Hosted models have no route for their health; the model's name is requested once."""
        if self._info.model is None:
            await super()._learn()


def encode(rendering: Rendering, call: EngineCall) -> bytes:
    """The body of a request, with messages. Raises RequestError for a call that the route cannot
    express."""
    sampling = call.sampling
    asked = _conversation(rendering, call)
    body: dict[str, Any] = {
        "model": call.info.model,
        "messages": [_chat(message) for message in asked.messages],
        "max_completion_tokens": sampling.max_tokens,
    }
    if asked.tools:
        body["tools"] = asked.tools
    for name, neutral in _OPTIONAL.items():
        if getattr(sampling, name) != neutral:
            body[name] = getattr(sampling, name)
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    return orjson.dumps(body)


def decode(
    rendering: Rendering, payloads: list[bytes], call: EngineCall, given: int
) -> Iterator[Chunk]:
    """The answer as one chunk. Raises UnusableAnswer if the chat template of the proxy's model
    cannot express it."""
    for payload in payloads:
        answer = answer_in(payload, _DECODER)
        for choice in answer.choices:
            yield _chunk(rendering, choice, call.sampling)


def _conversation(rendering: Rendering, call: EngineCall) -> Conversation:
    check_sampling(call.sampling, "the hosted model")
    asked = call.sampling.conversation
    if asked is None or asked.raw is not None:
        raise RequestError("prompt: the hosted model takes messages only", param="prompt")
    end = rendering.full(asked)[-END_IDS:].tolist()
    begun = call.prompt_ids[-END_IDS:].tolist() != end
    if begun or (asked.messages and asked.messages[-1].role == "assistant"):
        raise RequestError(
            "messages: the hosted model cannot continue an answer that the request begins "
            "(tool_choice, or a last assistant message)",
            param="messages",
        )
    return asked


def _chunk(rendering: Rendering, choice: _Choice, sampling: Sampling) -> Chunk:
    reason = choice.finish_reason or "stop"
    ended = FinishReason.STOP if reason == "tool_calls" else finish_reason(reason)
    said, asked = choice.message, sampling.conversation or Conversation([])
    calls = [
        ToolCall(call.id, call.function.name, call.function.arguments)
        for call in said.tool_calls or ()
    ]
    answer = Message("assistant", said.content or "", said.reasoning_content, calls)
    ids = answer_ids(rendering, asked, answer, truncated=ended is FinishReason.LENGTH)
    if ids is None:
        raise UnusableAnswer(
            "gave an answer that the chat template of the proxy's model cannot express"
        )
    return Chunk(ids, [math.nan] * len(ids), finish_reason=ended)


def _chat(message: Message) -> dict[str, Any]:
    """The message as Chat Completions takes it. Reasoning is the model's own and is not sent."""
    entry: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.role == "tool":
        entry["tool_call_id"] = message.tool_call_id or ""
    if message.tool_calls:
        entry["content"] = message.text or None
        entry["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    return entry
