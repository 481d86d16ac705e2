"""What the engines that are reached by HTTP have in common; each of them is a wire.

Invariant: a generation that is left before its end is aborted, `info` says how the replica is, and
what its wire cannot decode, or an error in its place, is an EngineError (or RequestError) with the
replica's URL.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

import msgspec

from proxy.engines.generation import checked, watched
from proxy.engines.protocol import Chunk, EngineInfo, Sampling
from proxy.engines.upstream import Upstream
from proxy.records import FinishReason, Ids

CONTROL_TIMEOUT_S = 30.0
"""A server that compiles, or whose machine is overloaded, answers late and is not dead."""


_FINISH = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.CUT,
}


class Failure(msgspec.Struct, gc=False):
    """What an engine says when a call failed that had begun well."""

    message: str = ""
    code: int | str | None = 500


class Answer(msgspec.Struct, gc=False):
    """A body or an event, which each wire adds its fields to."""

    error: Failure | None = None


A = TypeVar("A", bound=Answer)


class HttpEngine(ABC, Generic[A]):
    """Implements `proxy.engines.protocol.Engine`."""

    route: str
    """Where a generation is asked for."""
    _decoder: msgspec.json.Decoder[A]

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
        body = self._body(prompt_ids, sampling, request_id, cache_salt, stream)
        chunks = self._stream(body, sampling) if stream else self._whole(body, sampling)
        return watched(chunks, self._info, lambda: self.abort(request_id))

    async def abort(self, request_id: str) -> None:
        """Where the wire has no route for it, the closed connection is what ends a generation."""

    async def check(self) -> None:
        await checked(self._info, self._learn())

    async def close(self) -> None:
        await self._upstream.close()

    @abstractmethod
    def _body(
        self,
        prompt_ids: Ids,
        sampling: Sampling,
        request_id: str,
        cache_salt: str | None,
        stream: bool,
    ) -> bytes:
        """The request."""

    @abstractmethod
    def _chunks(self, payloads: list[bytes], sampling: Sampling, given: int) -> Iterator[Chunk]:
        """What events that came together say (or a whole body), `given` tokens into the call."""

    def _decode(self, payload: bytes) -> A:
        """Raises EngineError and RequestError."""
        try:
            answer = self._decoder.decode(payload)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            raise self._upstream.fault(f"did not speak its protocol: {error}") from error
        if answer.error is not None:
            code = answer.error.code if isinstance(answer.error.code, int) else 500
            raise self._upstream.refusal(code, answer.error.message)
        return answer

    def _finish_reason(self, name: str) -> FinishReason:
        """Raises EngineError for one that nobody knows."""
        if name not in _FINISH:
            raise self._upstream.fault(f"gave finish_reason {name!r}")
        return _FINISH[name]

    async def _stream(self, body: bytes, sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        given = 0
        async with aclosing(self._upstream.events(self.route, body)) as events:
            async for payloads in events:
                said = [payload for payload in payloads if payload != b"[DONE]"]
                for chunk in self._chunks(said, sampling, given):
                    given += len(chunk.ids)
                    yield chunk

    async def _whole(self, body: bytes, sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        for chunk in self._chunks([await self._upstream.post(self.route, body)], sampling, 0):
            yield chunk

    async def _learn(self) -> None:
        """Model and context, asked once; health, every time."""
        info = self._info
        await self._upstream.get("/health", timeout_s=CONTROL_TIMEOUT_S)
        if info.max_context_tokens is None:
            listing = await self._upstream.get("/v1/models", timeout_s=CONTROL_TIMEOUT_S)
            served: dict[str, Any] = next(iter((listing or {}).get("data", [])), {})
            info.model = info.model or served.get("id")
            info.max_context_tokens = served.get("max_model_len")
