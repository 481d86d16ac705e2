"""Any `/v1/completions` that takes token ids and tells those that it sampled.

vLLM of any age does: `return_token_ids`, and before it `return_tokens_as_token_ids`. Invariant: an
answer without ids, or with an id that has no log-probability, is an error, never a guess. What the
log-probabilities are of is the server's setting (vLLM: `--logprobs-mode processed_logprobs`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
import orjson

from proxy.engines.generation import checked, watched
from proxy.engines.protocol import Chunk, EngineInfo, Sampling
from proxy.engines.upstream import Upstream
from proxy.engines.vllm import CONTROL_TIMEOUT_S, MISSING_LOGPROB, sampling_params
from proxy.errors import ProxyError
from proxy.records import FinishReason, Ids

COMPLETIONS = "/v1/completions"
_TOKEN_WORD = "token_id:"
_FINISH = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.CUT,
}


class _Logprobs(msgspec.Struct, gc=False):
    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct, gc=False):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _Error(msgspec.Struct, gc=False):
    message: str = ""
    code: int | str | None = 500


class _Answer(msgspec.Struct, gc=False):
    choices: list[_Choice] = []
    error: _Error | None = None


class CompletionsEngine:
    """Implements `proxy.engines.protocol.Engine`. It tells no weight versions."""

    def __init__(
        self,
        url: str,
        *,
        name: str | None = None,
        api_key: str | None = None,
        model: str | None = None,
        stall_timeout_s: float = 600.0,
    ) -> None:
        self._upstream = Upstream(url, api_key=api_key, stall_timeout_s=stall_timeout_s)
        self._decoder = msgspec.json.Decoder(_Answer)
        self._info = EngineInfo(
            name=name or urlsplit(self._upstream.url).netloc, url=self._upstream.url, model=model
        )

    @property
    def info(self) -> EngineInfo:
        return self._info

    def generate(
        self,
        prompt_ids: Ids,
        sampling: Sampling,
        *,
        request_id: str,
        cache_salt: str | None = None,
        stream: bool = True,
    ) -> AsyncGenerator[Chunk, None]:
        body = _request_body(prompt_ids, sampling, self._info.model, cache_salt, stream)
        chunks = self._stream(body) if stream else self._whole(body)
        return watched(chunks, self._info, lambda: self.abort(request_id))

    async def abort(self, request_id: str) -> None:
        """The closed connection is what ends a completion; there is no route for it."""

    async def check(self) -> None:
        await checked(self._info, self._learn())

    async def close(self) -> None:
        await self._upstream.close()

    async def _learn(self) -> None:
        await self._upstream.get("/health", timeout_s=CONTROL_TIMEOUT_S)
        listing = await self._upstream.get("/v1/models", timeout_s=CONTROL_TIMEOUT_S)
        served: dict[str, Any] = next(iter((listing or {}).get("data", [])), {})
        self._info.model = self._info.model or served.get("id")
        self._info.max_context_tokens = served.get("max_model_len")

    async def _stream(self, body: bytes) -> AsyncGenerator[Chunk, None]:
        async with aclosing(self._upstream.events(COMPLETIONS, body)) as events:
            async for payloads in events:
                for payload in payloads:
                    for choice in () if payload == b"[DONE]" else self._decode(payload):
                        yield self._chunk(choice)

    async def _whole(self, body: bytes) -> AsyncGenerator[Chunk, None]:
        for choice in self._decode(await self._upstream.post(COMPLETIONS, body)):
            yield self._chunk(choice)

    def _decode(self, payload: bytes) -> list[_Choice]:
        try:
            answer = self._decoder.decode(payload)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            raise self._upstream.fault(f"did not speak its protocol: {error}") from error
        if answer.error is not None:
            raise self._failure(answer.error)
        return answer.choices

    def _failure(self, error: _Error) -> ProxyError:
        code = error.code if isinstance(error.code, int) else 500
        return self._upstream.refusal(code, error.message)

    def _chunk(self, choice: _Choice) -> Chunk:
        logprobs = choice.logprobs or _Logprobs()
        ids = choice.token_ids
        if ids is None:
            ids = [self._token_id(word) for word in logprobs.tokens]
        known = [p for p in logprobs.token_logprobs if p is not None and p > MISSING_LOGPROB]
        if len(known) != len(ids):
            raise self._upstream.fault(
                f"sent {len(ids)} token ids and {len(known)} log-probabilities"
            )
        chunk = Chunk(ids, known, stop_reason=choice.stop_reason)
        if logprobs.top_logprobs:
            chunk.top_logprobs = [
                [(self._token_id(word), p) for word, p in (top or {}).items()]
                for top in logprobs.top_logprobs
            ]
        if choice.finish_reason is not None:
            if choice.finish_reason not in _FINISH:
                raise self._upstream.fault(f"gave finish_reason {choice.finish_reason!r}")
            chunk.finish_reason = _FINISH[choice.finish_reason]
        return chunk

    def _token_id(self, word: str) -> int:
        if not word.startswith(_TOKEN_WORD):
            raise self._upstream.fault("tells no token ids: it cannot be trained on")
        return int(word.removeprefix(_TOKEN_WORD))


def _request_body(
    prompt_ids: Ids, sampling: Sampling, model: str | None, cache_salt: str | None, stream: bool
) -> bytes:
    body = sampling_params(sampling)
    del body["detokenize"]
    body |= {
        "prompt": np.ascontiguousarray(prompt_ids),
        "stream": stream,
        "add_special_tokens": False,
        "skip_special_tokens": False,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    if model is not None:
        body["model"] = model
    if cache_salt is not None:
        body["cache_salt"] = cache_salt
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
