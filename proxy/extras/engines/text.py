"""The client of a server that accepts and returns only text: any OpenAI-compatible
`/v1/completions`.

The prompt is sent as decoded text, and the answer's text is tokenised here. Invariant: its answers
are never trained. It serves only EVAL sessions (the router sends it no call of a TRAIN session),
and each of its tokens is recorded with a log-probability of NaN, which trajectories refuse.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Self

import msgspec
import orjson

from proxy.config import EngineConfig
from proxy.engines.http_engine import Answer, Choice, HttpEngine
from proxy.engines.protocol import Chunk, Sampling
from proxy.extras.engines.text_only import MAX_STOPS, check_sampling
from proxy.records import Ids
from proxy.rendering.tokenizer import Tokenizer

ROUTE = "/v1/completions"


class _Choice(Choice, gc=False):
    text: str = ""
    finish_reason: str | None = None


class _Answer(Answer, gc=False):
    choices: list[_Choice] = msgspec.field(default_factory=list)


class TextEngine(HttpEngine[_Answer]):
    """Implements `proxy.engines.protocol.Engine`. Does not report token ids or versions."""

    route = ROUTE
    _decoder = msgspec.json.Decoder(_Answer)

    def __init__(self, url: str, *, tokenizer: Tokenizer, **more: Any) -> None:
        super().__init__(url, **more)
        self._tokenizer = tokenizer
        self._info.text_only = True

    @classmethod
    def from_config(cls, config: EngineConfig, tokenizer: Tokenizer) -> Self:
        """Implements `proxy.engines.registry.MakeEngine`."""
        key = config.api_key.get_secret_value() if config.api_key else None
        return cls(
            config.url, tokenizer=tokenizer, name=config.name, api_key=key, model=config.model
        )

    def _body(
        self,
        prompt_ids: Ids,
        sampling: Sampling,
        request_id: str,
        cache_salt: str | None,
        stream: bool,
    ) -> bytes:
        check_sampling(sampling, "the text-only engine")
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

    def _chunks(
        self, answers: Sequence[_Answer], sampling: Sampling, given: int
    ) -> Iterator[Chunk]:
        for answer in answers:
            for choice in answer.choices:
                ids = self._tokenizer.encode(choice.text)
                chunk = Chunk(ids, [math.nan] * len(ids))
                if choice.finish_reason is not None:
                    chunk.finish_reason = self._finish_reason(choice.finish_reason)
                yield chunk
