"""The client of an engine that is reached by HTTP. Three plain functions make one:

    encode(call)                    the body of the request
    post(upstream, call, received)  sends it, and passes what the engine answers to `received`
                                    (`posting` makes one of a route and `encode`)
    decode(payloads, call, given)   the chunks in events that arrived together, or in a whole body

A class of a kind (`VllmEngine`) only puts its three together, and adds how the engine is asked for
its state.

Invariant: a generation that is cancelled, or whose taker raises an error, before the last chunk is
aborted at the engine, and one that has ended is not; `info` describes the replica, and
`info.in_flight` counts its running generations; and an error, or a response that cannot be decoded,
is raised as an EngineError (or an EngineRefusal) with the replica's URL, which is added in one
place (`Received.take_all`): the functions raise UnusableAnswer and ReportedFailure without it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import urlsplit

import msgspec

from proxy.config import EngineConfig
from proxy.engines.answer_check import MAX_VERSION
from proxy.engines.protocol import Chunk, EngineInfo, PreparedImage, Sampling, Take
from proxy.engines.upstream import MAX_EVENT_BYTES, NOT_OFFERED, NotFound, Upstream
from proxy.errors import EngineError, EngineRefusal, MissingAdapter
from proxy.records import Alternatives, FinishReason, Ids
from proxy.records.alternatives import Reported, table

if TYPE_CHECKING:
    from proxy.rendering.rendering import Rendering

CONTROL_TIMEOUT_S = 30.0
"""Long, because a server that compiles, or whose machine is overloaded, is slow but not dead."""
FIRST_LABEL = "default"
"""vLLM's and SGLang's label of the weights with which an engine was started."""
END_WAIT_S = 1.0
"""How long to wait for the end of a stream after the finish reason. The remaining events are
checked, and a connection that is read to its end can be reused."""
MAX_EXPERTS_BYTES = 2**30
"""Maximum size of an event with routed experts: in base64, those of 2 million tokens of a model
with 48 layers and 8 experts per token."""
TOO_MANY_ALTERNATIVES = (
    "start the engine with a higher --max-logprobs, or lower the session's sampling.alternatives or"
    " the proxy's sessions.alternatives"
)
MAX_REST = 16
"""Number of events that are read after the finish reason; engines send one or two (usage,
`[DONE]`)."""

_FINISH = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.CUT,
}


class EngineFailure(msgspec.Struct, gc=False):
    """What an engine reports when a call fails after it has begun."""

    message: str = ""
    code: int | str | None = 500


class Choice(msgspec.Struct, gc=False):
    """One of the answers to a request; the proxy requests one."""

    index: int = 0


class Answer(msgspec.Struct, gc=False):
    """A response body or an event. Each wire format adds its fields."""

    error: EngineFailure | None = None
    choices: Sequence[Choice] = ()
    """At most one, with index 0; empty in an event such as the usage, and in formats without it."""


class _Model(msgspec.Struct, gc=False):
    id: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct, gc=False):
    """`GET /v1/models`."""

    data: list[_Model] = []


A = TypeVar("A", bound=Answer)


class UnusableAnswer(Exception):
    """An engine's answer breaks its format. The message is the end of a sentence about it."""


class ReportedFailure(Exception):
    """What an engine reports in its answer: the `code` is an HTTP status."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    @classmethod
    def of(cls, failure: EngineFailure) -> Self:
        """The failure in an answer. Codes that are names are those of the engine's own faults."""
        return cls(failure.code if isinstance(failure.code, int) else 500, failure.message)


@dataclass(frozen=True, slots=True)
class EngineCall:
    """One call of one replica; `request_id`, `cache_salt` and `stream` as in `Engine.generate`."""

    prompt_ids: Ids
    sampling: Sampling
    request_id: str
    cache_salt: str | None
    stream: bool
    info: EngineInfo
    """The replica's state. `decode` updates its version from the answer."""


Encode = Callable[[EngineCall], bytes]
Decode = Callable[[list[bytes], EngineCall, int], Iterable[Chunk]]
"""Gets payloads, the call, and the number of tokens before them. Raises UnusableAnswer and
ReportedFailure, after the chunks before the fault."""


class Received:
    """What an engine has sent for one call. The last chunk is kept until the response has ended."""

    def __init__(self, decode: Decode, upstream: Upstream, call: EngineCall, take: Take) -> None:
        self.last: Chunk | None = None
        """The chunk with the finish reason, once it was received."""
        self.is_unwanted = False
        """Whether `take` has raised an error."""
        self.cancels_itself = False
        """Whether the engine learns without an abort request that nobody wants the rest."""
        self.is_complete = False
        """Whether everything up to the finish reason was valid. What follows is read until the
        response ends, for at most END_WAIT_S and MAX_REST events."""
        self.time_left: asyncio.Timeout | None = None
        self._decode = decode
        self._upstream = upstream
        self._call = call
        self._take = take
        self.tokens = 0
        """Number of tokens that it has sent."""
        self._rest: list[bytes] = []

    def payloads(self, payloads: list[bytes]) -> None:
        """Takes events that arrived together, or a whole body. Raises EngineError."""
        said = [payload for payload in payloads if payload != b"[DONE]"]
        if self.is_complete:
            self._rest += said
            if len(self._rest) > MAX_REST:
                raise self._upstream.fault(
                    f"sent more than {MAX_REST} events after its finish reason"
                )
            return
        self.take_all(self._decode(said, self._call, self.tokens))
        if self.last is not None:
            self.is_complete = True
            if self.time_left is not None:
                self.time_left.reschedule(asyncio.get_running_loop().time() + END_WAIT_S)

    def end(self) -> Chunk:
        """The last chunk, for after the response has ended. Raises EngineError if there is none, or
        if there was more after it."""
        if self._rest:
            self.take_all(self._decode(self._rest, self._call, self.tokens))
        if self.last is None:
            raise self._upstream.fault("ended its stream without a finish reason")
        return self.last

    def take_all(self, chunks: Iterable[Chunk]) -> None:
        """Takes chunks. Raises EngineError, EngineRefusal, and what the call's `take` raises."""
        try:
            for chunk in chunks:
                self._take_one(chunk)
        except UnusableAnswer as fault:
            raise self._upstream.fault(str(fault)) from fault
        except ReportedFailure as failure:
            raise self._upstream.refusal(failure.code, failure.message) from failure

    def _take_one(self, chunk: Chunk) -> None:
        if self.last is not None:
            if chunk.ids or chunk.finish_reason is not None:
                raise UnusableAnswer(
                    "sent tokens or a second finish reason after its finish reason"
                )
            return
        self.tokens += len(chunk.ids)
        if chunk.finish_reason is not None:
            self.last = chunk
            return
        try:
            self._take(chunk)
        except Exception:
            self.is_unwanted = True
            raise


Post = Callable[[Upstream, EngineCall, Received], Awaitable[None]]


def posting(route: str, encode: Encode, *, streams: bool = True) -> Post:
    """The function that posts what `encode` returns to `route`. `streams`: whether the engine
    answers in events if the call wants a stream; else it always answers with a whole body."""

    async def post(upstream: Upstream, call: EngineCall, received: Received) -> None:
        await send(upstream, route, encode(call), call, received, streams=streams)

    return post


async def send(
    upstream: Upstream,
    route: str,
    body: bytes,
    call: EngineCall,
    received: Received,
    *,
    streams: bool = True,
) -> None:
    """Posts the body of a call; as `posting`."""
    if not (streams and call.stream):
        received.payloads([await upstream.post(route, body)])
        return
    limit = MAX_EVENT_BYTES if call.sampling.experts_from is None else MAX_EXPERTS_BYTES
    try:
        async with asyncio.timeout(None) as received.time_left:
            await upstream.events(route, body, received.payloads, event_bytes=limit)
    except (EngineError, TimeoutError):
        if not received.is_complete:
            raise


class HttpEngine:
    """Implements `proxy.engines.protocol.Engine`.

    Example: HttpEngine("http://10.1.2.3:8000", post=posting("/generate", encode), decode=decode)
    """

    def __init__(
        self,
        url: str,
        *,
        post: Post,
        decode: Decode,
        name: str | None = None,
        api_key: str | None = None,
        model: str | None = None,
        health: str = "/health",
        stall_timeout_s: float = 600.0,
    ) -> None:
        """`health`: the path that a healthy replica answers."""
        self._health = health
        self._post = post
        self._decode = decode
        self._upstream = Upstream(url, api_key=api_key, stall_timeout_s=stall_timeout_s)
        self._info = EngineInfo(
            name=name or urlsplit(self._upstream.url).netloc, url=self._upstream.url, model=model
        )

    @classmethod
    def from_config(cls, config: EngineConfig, rendering: Rendering) -> Self:
        """Implements `proxy.engines.registry.MakeEngine`, for kinds that need no more than this."""
        return cls(**connection(config))

    @property
    def info(self) -> EngineInfo:
        return self._info

    async def generate(
        self,
        prompt_ids: Ids,
        sampling: Sampling,
        take: Take,
        *,
        request_id: str,
        cache_salt: str | None = None,
        stream: bool = True,
    ) -> None:
        if sampling.images is not None and not self._info.images:
            raise self._upstream.fault("does not read images, and the prompt has some")
        call = EngineCall(prompt_ids, sampling, request_id, cache_salt, stream, self._info)
        received = Received(self._decode, self._upstream, call, take)
        self._info.in_flight += 1
        try:
            await self._post(self._upstream, call, received)
            last = received.end()
        except NotFound as error:
            if sampling.adapter:
                raise MissingAdapter(error.message) from error
            raise
        except EngineRefusal as error:
            if sampling.alternatives > sampling.top_logprobs and "logprobs" in error.message:
                raise EngineRefusal(f"{error.message}; {TOO_MANY_ALTERNATIVES}") from error
            raise
        except asyncio.CancelledError:
            await self._abandon(request_id, received)
            raise
        except Exception:
            if received.is_unwanted:
                await self._abandon(request_id, received)
            raise
        finally:
            self._info.in_flight -= 1
        take(last)

    async def _abandon(self, request_id: str, received: Received) -> None:
        if received.last is None and not received.cancels_itself:
            with contextlib.suppress(EngineError):
                await self.abort(request_id)

    async def abort(self, request_id: str) -> None:
        """Does nothing by default: closing the connection ends the call."""

    async def prepare(self, data: bytes, media_type: str) -> PreparedImage:
        """By default, engines prepare no images."""
        raise self._upstream.fault("does not read images")

    def forget(self, session_id: str) -> None:
        """Does nothing by default: nothing is kept of a session."""

    async def check(self) -> None:
        try:
            await self._learn()
        except EngineError:
            self._info.healthy = False
            self._info.cache_tokens = None  # it may come back with another size
            self._info.details = {}
            raise
        self._info.healthy = True

    async def close(self) -> None:
        await self._upstream.close()

    async def _learn_version(self, path: str) -> None:
        """Requests the engine's label of its weights, which it need not report."""
        said = await self._upstream.get(path, timeout_s=CONTROL_TIMEOUT_S, absent=NOT_OFFERED)
        label = said.get("weight_version") if isinstance(said, dict) else None
        try:
            self._info.version = weight_version(label, self._info)
        except UnusableAnswer as fault:
            raise self._upstream.fault(str(fault)) from fault

    async def _learn(self) -> None:
        """Requests the health each time, and the model and its context length once."""
        info = self._info
        await self._upstream.get(self._health, timeout_s=CONTROL_TIMEOUT_S)
        if info.max_context_tokens is not None:
            return
        listing = await self._upstream.get("/v1/models", timeout_s=CONTROL_TIMEOUT_S)
        try:
            served = msgspec.convert(listing or {}, _Models).data[:1]
        except msgspec.ValidationError as error:
            raise self._upstream.fault(f"listed its models in an unknown form: {error}") from error
        for model in served:
            info.model = info.model or model.id
            info.max_context_tokens = model.max_model_len


def connection(config: EngineConfig) -> dict[str, Any]:
    """The arguments of `HttpEngine` that the configuration gives."""
    key = config.api_key.get_secret_value() if config.api_key else None
    return {"url": config.url, "name": config.name, "api_key": key, "model": config.model}


def answer_in(payload: bytes, decoder: msgspec.json.Decoder[A]) -> A:
    """The answer in a payload. Raises UnusableAnswer and ReportedFailure."""
    try:
        answer = decoder.decode(payload)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise UnusableAnswer(f"sent an invalid response: {error}") from error
    if answer.error is not None:
        raise ReportedFailure.of(answer.error)
    if answer.choices and (len(answer.choices) > 1 or answer.choices[0].index != 0):
        raise UnusableAnswer(f"sent {len(answer.choices)} choices, or a choice other than 0")
    return answer


def recorded(reported: Reported, sampling: Sampling) -> Alternatives | None:
    """The alternatives to record, if they are wanted. Raises UnusableAnswer."""
    if not sampling.alternatives:
        return None
    try:
        return table(reported, sampling.alternatives)
    except ValueError as error:
        raise UnusableAnswer(f"sent {error}") from error


def finish_reason(name: str) -> FinishReason:
    """Raises UnusableAnswer for an unknown finish reason."""
    if name not in _FINISH:
        raise UnusableAnswer(f"sent the unknown finish reason {name[:40]!r}")
    return _FINISH[name]


def weight_version(label: object, info: EngineInfo) -> int:
    """The version in an engine's weight label, which is `default` until a number is set: the
    version of these weights is 0, also where an answer reports them after an update. A label of
    another kind leaves the version that `info` has.

    Raises UnusableAnswer.
    """
    text = str(label)
    if text != FIRST_LABEL and not (text.isascii() and text.isdigit()):
        return info.version
    info.reports_version = True
    if text == FIRST_LABEL:
        return 0
    if len(text) > len(str(MAX_VERSION)) or int(text) > MAX_VERSION:
        raise UnusableAnswer(f"reported weight version {text[:20]}; the maximum is {MAX_VERSION}")
    return int(text)
