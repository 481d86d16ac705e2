"""OpenAI Completions: `POST /v1/completions`, a prompt of text or token ids without a template.

A prompt that begins with a recorded prompt and its answer continues that turn.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import orjson

from proxy.conversation import Conversation
from proxy.errors import ProxyError
from proxy.records import FinishReason
from proxy.rendering.deltas import TextDelta
from proxy.wire.chat import MAX_CHOICES, openai_error, parse_sampling, sse, usage
from proxy.wire.dialect import Call, Headers, Outcome, Piece, SampledToken
from proxy.wire.fields import Fields
from proxy.wire.known_fields import unknown_fields

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for this route."""
MAX_LOGPROBS = 20
MAX_TOKEN_ID = 2**31 - 1


class CompletionsDialect:
    """The dialect of `/v1/completions`."""

    name = "completions"
    route = "completions"

    def parse(self, fields: Fields, headers: Headers) -> Call:
        if fields.flag("echo") and fields.get("logprobs") is not None:
            raise fields.refuse("echo", "false when logprobs is set")
        options = parse_sampling(fields)
        options.max_tokens = options.max_tokens or DEFAULT_MAX_TOKENS
        top = fields.integer("logprobs", 0, MAX_LOGPROBS)
        options.logprobs, options.top_logprobs = top is not None, top or 0
        options.every_token = True
        return Call(
            model=fields.text("model", ""),
            conversation=Conversation([], raw=_prompt(fields)),
            options=options,
            n=fields.integer("n", 1, MAX_CHOICES) or 1,
            stream=fields.flag("stream"),
            extra={
                "usage": fields.child("stream_options").flag("include_usage"),
                "echo": fields.get("prompt") if fields.flag("echo") else "",
            },
            unknown=unknown_fields(fields, self.name),
        )

    def whole(self, call: Call, answer_id: str, outcomes: Sequence[Outcome]) -> bytes:
        choices = [
            _choice(i, _echoed(call) + outcome.message.text, outcome.tokens, outcome.finish_reason)
            for i, outcome in enumerate(outcomes)
        ]
        return orjson.dumps(
            {**_head(call, answer_id), "choices": choices, "usage": usage(outcomes)}
        )

    def writer(self, call: Call, answer_id: str) -> CompletionsWriter:
        return CompletionsWriter(call, answer_id)

    def error(self, error: ProxyError) -> bytes:
        return openai_error(error)


class CompletionsWriter:
    """Writes the stream of a `/v1/completions` answer."""

    def __init__(self, call: Call, answer_id: str) -> None:
        self._call = call
        self._head = _head(call, answer_id)
        self._offsets = [0] * call.n
        """Where each choice's next token begins in its text."""

    def start(self, prompt_tokens: int, turn: int) -> bytes:
        echo = _echoed(self._call)
        if not echo:
            return b""
        return b"".join(self._chunk(_choice(i, echo, [], None)) for i in range(self._call.n))

    def piece(self, piece: Piece) -> bytes:
        text = "".join(delta.text for delta in piece.deltas if isinstance(delta, TextDelta))
        at = self._offsets[piece.choice]
        self._offsets[piece.choice] += sum(len(token.text) for token in piece.tokens)
        return self._chunk(_choice(piece.choice, text, piece.tokens, None, at))

    def end(self, outcomes: Sequence[Outcome]) -> bytes:
        chunks = [
            self._chunk(_choice(i, "", [], outcome.finish_reason))
            for i, outcome in enumerate(outcomes)
        ]
        if self._call.extra["usage"]:
            chunks.append(sse({**self._head, "choices": [], "usage": usage(outcomes)}))
        return b"".join([*chunks, b"data: [DONE]\n\n"])

    def error(self, error: ProxyError) -> bytes:
        return b"data: " + openai_error(error) + b"\n\n"

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return sse({**self._head, "choices": [choice]})


def _prompt(fields: Fields) -> str | list[int]:
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt:
        ids = [i for i in prompt if type(i) is int and 0 <= i <= MAX_TOKEN_ID]
        if len(ids) == len(prompt):
            return ids
    raise fields.refuse("prompt", "one non-empty string, or one non-empty list of token ids")


def _echoed(call: Call) -> str:
    echo = call.extra["echo"]
    return echo if isinstance(echo, str) else ""


def _head(call: Call, answer_id: str) -> dict[str, Any]:
    return {
        "id": f"cmpl-{answer_id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": call.model,
    }


def _choice(
    index: int,
    text: str,
    tokens: Sequence[SampledToken],
    finish_reason: FinishReason | None,
    at: int = 0,
) -> dict[str, Any]:
    """`at`: where the first token begins in the choice's text."""
    logprobs = None
    if tokens:
        offsets = []
        for token in tokens:
            offsets.append(at)
            at += len(token.text)
        logprobs = {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [dict(token.top) for token in tokens],
            "text_offset": offsets,
        }
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
