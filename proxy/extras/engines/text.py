"""The client of a server that accepts and returns only text: any OpenAI-compatible
`/v1/completions`.

The prompt is sent as decoded text, and the answer's text is tokenised here. Invariant: its answers
are never trained. It serves only EVAL sessions (the router sends it no call of a TRAIN session),
and each of its tokens is recorded with a log-probability of NaN, which trajectories refuse.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, Self

import msgspec
import orjson

from proxy.config import EngineConfig
from proxy.engines.http_engine import (
    Answer,
    Choice,
    EngineCall,
    HttpEngine,
    answer_in,
    connection,
    finish_reason,
    posting,
)
from proxy.engines.protocol import Chunk
from proxy.extras.engines.text_only import MAX_STOPS, check_sampling
from proxy.rendering.rendering import Rendering
from proxy.rendering.tokenizer import Tokenizer

ROUTE = "/v1/completions"


class _Choice(Choice, gc=False):
    text: str = ""
    finish_reason: str | None = None


class _Answer(Answer, gc=False):
    choices: list[_Choice] = msgspec.field(default_factory=list)


_DECODER = msgspec.json.Decoder(_Answer)


class TextEngine(HttpEngine):
    """Does not report token ids or versions."""

    def __init__(self, url: str, *, tokenizer: Tokenizer, **more: Any) -> None:
        post = posting(ROUTE, partial(encode, tokenizer))
        super().__init__(url, post=post, decode=partial(decode, tokenizer), **more)
        self._info.text_only = True

    @classmethod
    def from_config(cls, config: EngineConfig, rendering: Rendering) -> Self:
        return cls(tokenizer=rendering.tokenizer, **connection(config))


def encode(tokenizer: Tokenizer, call: EngineCall) -> bytes:
    """The body of a request, with the prompt as text."""
    sampling = call.sampling
    check_sampling(sampling, "the text-only engine")
    ends = [tokenizer.decode([token]) for token in sampling.stop_token_ids]
    body: dict[str, Any] = {
        "prompt": tokenizer.decode(call.prompt_ids.tolist()),
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "stop": [*sampling.stop, *ends][:MAX_STOPS],
        "stream": call.stream,
    }
    for name in ("presence_penalty", "frequency_penalty", "seed"):
        if getattr(sampling, name) is not None:
            body[name] = getattr(sampling, name)
    if call.info.model is not None:
        body["model"] = call.info.model
    return orjson.dumps(body)


def decode(
    tokenizer: Tokenizer, payloads: list[bytes], call: EngineCall, given: int
) -> Iterator[Chunk]:
    """One chunk per event, with the ids of its text."""
    for payload in payloads:
        answer = answer_in(payload, _DECODER)
        for choice in answer.choices:
            ids = tokenizer.encode(choice.text)
            chunk = Chunk(ids, [math.nan] * len(ids))
            if choice.finish_reason is not None:
                chunk.finish_reason = finish_reason(choice.finish_reason)
            yield chunk
