"""An engine: a model in Ollama, by its own `POST /api/chat`, for sessions that are not trained.

    engines:
      - kind: "examples/own_parts/ollama_engine.py:make_engine"
        url: http://127.0.0.1:11434
        model: qwen3:8b

Ollama takes messages and returns text. So the engine renders the answer with the chat template of
the proxy's model, and its tokens are never trained (`text_only`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import orjson

from proxy.config import EngineConfig
from proxy.conversation.messages import Conversation, Message
from proxy.engines.http_engine import (
    EngineCall,
    HttpEngine,
    ReportedFailure,
    UnusableAnswer,
    connection,
    finish_reason,
    posting,
)
from proxy.engines.protocol import Chunk
from proxy.errors import RequestError
from proxy.rendering.answers import answer_ids
from proxy.rendering.rendering import Rendering


def make_engine(config: EngineConfig, rendering: Rendering) -> HttpEngine:
    """Implements `proxy.engines.registry.MakeEngine`."""
    post = posting("/api/chat", encode, streams=False)
    decoded = partial(decode, rendering)
    engine = HttpEngine(post=post, decode=decoded, health="/api/version", **connection(config))
    engine.info.text_only = True
    return engine


def encode(call: EngineCall) -> bytes:
    """The body of a request."""
    sampling, asked = call.sampling, call.sampling.conversation
    if asked is None or asked.tools:
        raise RequestError("this engine takes messages without tools", param="tools")
    messages = [{"role": message.role, "content": message.text} for message in asked.messages]
    options = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "num_predict": sampling.max_tokens,
        "stop": list(sampling.stop),
    }
    body = {"model": call.info.model, "messages": messages, "options": options, "stream": False}
    return orjson.dumps(body)


def decode(
    rendering: Rendering, payloads: list[bytes], call: EngineCall, given: int
) -> Iterator[Chunk]:
    """The answer as one chunk, with the ids that the proxy's model would have sampled for it."""
    for payload in payloads:
        said = orjson.loads(payload)
        if "error" in said:
            raise ReportedFailure(500, f"reported: {said['error']}")
        ended = finish_reason(said.get("done_reason", "stop"))
        answer = Message("assistant", said["message"]["content"])
        asked = call.sampling.conversation or Conversation([])
        ids = answer_ids(rendering, asked, answer, truncated=ended == "length")
        if ids is None:
            raise UnusableAnswer("gave an answer that the chat template cannot express")
        yield Chunk(ids, [math.nan] * len(ids), finish_reason=ended)
