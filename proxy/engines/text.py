"""A server that takes and gives text only: any OpenAI-compatible `/v1/completions`.

The prompt goes out as the text of its tokens, and the answer's text comes back and is tokenised
here. Invariant: nothing of it is ever trained. It serves EVAL sessions alone (the router sends it
no call of a TRAIN session), and each of its tokens is recorded with a log-probability of NaN, which
the trajectories refuse.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec
import orjson

from proxy.engines.http_engine import Answer, HttpEngine
from proxy.engines.protocol import Chunk, Sampling
from proxy.errors import RequestError
from proxy.records import Ids
from proxy.rendering.tokenizer import Tokenizer

ROUTE = "/v1/completions"
MAX_STOPS = 4
"""OpenAI's own bound."""
_NEUTRAL = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "structured": None}
"""What OpenAI's route has no name for, with the value that asks for nothing."""


class _Choice(msgspec.Struct, gc=False):
    text: str = ""
    finish_reason: str | None = None


class _Answer(Answer, gc=False):
    choices: list[_Choice] = msgspec.field(default_factory=list)


class TextEngine(HttpEngine[_Answer]):
    """Implements `proxy.engines.protocol.Engine`. It tells no tokens, versions or health."""

    route = ROUTE
    _decoder = msgspec.json.Decoder(_Answer)

    def __init__(self, url: str, *, tokenizer: Tokenizer, **more: Any) -> None:
        super().__init__(url, **more)
        self._tokenizer = tokenizer
        self._info.text_only = True

    def _body(
        self,
        prompt_ids: Ids,
        sampling: Sampling,
        request_id: str,
        cache_salt: str | None,
        stream: bool,
    ) -> bytes:
        _check(sampling)
        ends = [self._tokenizer.decode([token]) for token in sampling.stop_token_ids]
        body: dict[str, Any] = {
            "prompt": self._tokenizer.decode(prompt_ids.tolist()),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stop": [*sampling.stop, *ends][:MAX_STOPS],
            "stream": stream,
        }
        for name in ("presence_penalty", "frequency_penalty", "seed"):
            if getattr(sampling, name) is not None:
                body[name] = getattr(sampling, name)
        if self._info.model is not None:
            body["model"] = self._info.model
        return orjson.dumps(body)

    def _chunks(self, payloads: list[bytes], sampling: Sampling, given: int) -> Iterator[Chunk]:
        for payload in payloads:
            for choice in self._decode(payload).choices:
                ids = self._tokenizer.encode(choice.text)
                chunk = Chunk(ids, [math.nan] * len(ids))
                if choice.finish_reason is not None:
                    chunk.finish_reason = self._finish_reason(choice.finish_reason)
                yield chunk


def _check(sampling: Sampling) -> None:
    """Raises RequestError for what would change the answer and cannot be passed on."""
    for name, neutral in _NEUTRAL.items():
        value = getattr(sampling, name)
        if value != neutral:
            raise RequestError(f"{name}: the text-only engine cannot honour {value!r}", param=name)
    if sampling.logprobs or sampling.top_logprobs:
        raise RequestError("the text-only engine has no log-probabilities", param="logprobs")
    if len(sampling.stop) > MAX_STOPS:
        raise RequestError(
            f"stop: the text-only engine takes {MAX_STOPS}, not {len(sampling.stop)}", param="stop"
        )
