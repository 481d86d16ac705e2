"""The protocol between the proxy and a relay worker: msgpack messages in binary frames.

Ids are sent as raw little-endian int32 and log-probabilities as raw little-endian float32, so that
the proxy records exactly what the worker's engine returned.

Invariant: the frames of a call are numbered from 0 without gaps. The worker keeps each frame until
the proxy has acknowledged it, so that it can be sent again after a reconnect. At most `window`
frames are sent before they are acknowledged; the rest of an answer waits in the worker's memory,
whose bound is the answer's `max_tokens`.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import structs

from proxy.engines.protocol import Chunk, Sampling
from proxy.errors import EngineRefusal
from proxy.records import (
    Alternatives,
    FinishReason,
    RoutedExperts,
    VersionSpan,
    alternatives,
    routed_experts,
)

PROTOCOL_VERSION = 2
PATH = "/relay"

FRAME_BYTES = 32 * 2**20
"""Size of the largest message: enough for a prompt of 8 M tokens (int32)."""
EXPERTS_BYTES = FRAME_BYTES // 2
"""Size above which the routed experts of a call are left out of its last frame."""
ALTERNATIVES_BYTES = FRAME_BYTES // 4
"""Size above which the alternatives of a chunk are left out of its frame: 20 per token of an answer
of 52,000 tokens that is not streamed."""
MANY_TOKENS = 2**14
"""A chunk of so many always fits into a message; of more, its message is measured."""


Version = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""Version of the weights; recorded as int32."""


class Fingerprint(msgspec.Struct, frozen=True, array_like=True):
    """Identifies a side's model (hex SHA-256). If the two sides differ, the worker is refused."""

    tokenizer: str
    architecture: str


class Hello(msgspec.Struct, tag="hello", array_like=True):
    """The worker's first message on every connection."""

    protocol: int
    name: str
    incarnation: str
    """Random per worker process: the same after a reconnect, different after a restart."""
    fingerprint: Fingerprint
    model: str | None
    version: Version
    max_context_tokens: int | None
    max_calls: int
    calls: tuple[int, ...]
    """Calls of which the worker still keeps frames."""
    serves: Serves | None = None
    """The published weights that the engine serves; None: this process has loaded none."""


class Welcome(msgspec.Struct, tag="welcome", array_like=True):
    """The handshake succeeded."""

    window: int
    """Number of unacknowledged frames that the worker may keep per call."""
    grace_s: float
    """How long both sides keep calls alive without a connection, in seconds."""
    resumed: dict[int, int]
    """Call → number of the next frame that the proxy expects. All other calls have ended."""


class Refuse(msgspec.Struct, tag="refuse", array_like=True):
    """The proxy refuses the worker; another attempt would be refused too."""

    reason: str


class Generate(msgspec.Struct, tag="generate", array_like=True):
    """Asks the worker to sample an answer. `prompt` holds the token ids as bytes of int32."""

    call: int
    request_id: str
    prompt: bytes
    sampling: dict[str, Any]
    cache_salt: str | None
    stream: bool


class Frame(msgspec.Struct, tag="frame", array_like=True):
    """A chunk of a call, or its failure if `error` is set. `finish` or `error` marks the last."""

    call: int
    number: int
    ids: bytes = b""
    logprobs: bytes = b""
    top_logprobs: list[list[tuple[int, float]]] | None = None
    finish: str | None = None
    stop: int | str | None = None
    versions: tuple[tuple[Version, int, int], ...] = ()
    error: str | None = None
    refused: bool = False
    """With `error`: the engine refuses the request itself, and another replica would too."""
    lacks_adapter: bool = False
    """With `error`: the engine only lacks the adapter that the call names."""
    routed_experts: bytes | None = None
    alternatives: bytes | None = None

    @property
    def last(self) -> bool:
        return self.finish is not None or self.error is not None


class Taken(msgspec.Struct, tag="taken", array_like=True):
    """The proxy acknowledges every frame of the call with a number below `number`."""

    call: int
    number: int


class End(msgspec.Struct, tag="end", array_like=True):
    """The proxy is done with the call: the worker aborts it if it is running, and forgets it."""

    call: int


class AbortCall(msgspec.Struct, tag="abort", array_like=True):
    """The engine is to end the call early: its last frame then says so, with the tokens so far."""

    call: int


class Check(msgspec.Struct, tag="check", array_like=True):
    """Asks for the health of the worker's engine and the version of its weights."""

    number: int


class Describe(msgspec.Struct, tag="describe", array_like=True):
    """Asks in which types the worker's engine holds weights."""

    number: int
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    """Name, trained type and shape of each."""


class Described(msgspec.Struct, tag="described", array_like=True):
    """The answer to the `Describe` of the same number, as `Serves.held`."""

    number: int
    held: tuple[str | None, ...] | None


class Health(msgspec.Struct, tag="health", array_like=True):
    """The answer to the `Check` of the same number."""

    number: int
    version: Version
    error: str | None = None


class Weights(msgspec.Struct, tag="weights", array_like=True, frozen=True):
    """The engine is to serve these published weights (`relay.weights`), which the worker pulls
    from where its own configuration says, while the engine samples."""

    publication: str
    version: Version


class Serves(msgspec.Struct, tag="serves", array_like=True, frozen=True):
    """The engine serves these weights, or cannot because of `error`; the worker then tries again
    until others are wanted."""

    publication: str = ""
    version: Version = 0
    error: str | None = None
    adapter: str = ""
    """The engine's name of the adapter that these weights are; empty: they are no adapter."""
    held: tuple[str | None, ...] | None = None
    """The type in which the engine holds each tensor of the manifest; None: not at all, or, for all
    of them, unknown or an adapter's."""
    pulled_bytes: int = 0
    pull_s: float = 0.0
    paused_s: float = 0.0
    """Seconds during which the engine did not sample."""
    difference: float | None = None
    """Mean |Δ log p| of trainer and engine on the probe; None: the publication has none."""


class Leave(msgspec.Struct, tag="leave", array_like=True):
    """The worker finishes its calls, accepts no more, and then closes with code 1000."""


ToWorker = Welcome | Refuse | Generate | Taken | End | AbortCall | Check | Describe | Weights
ToProxy = Hello | Frame | Health | Described | Leave | Serves


class ProtocolError(Exception):
    """The other side broke the protocol; the connection is closed."""


def encode(message: ToWorker | ToProxy) -> bytes:
    return msgspec.msgpack.encode(message)


def decode_to_worker(data: bytes) -> ToWorker:
    message: ToWorker = _decode(data, ToWorker)
    return message


def decode_to_proxy(data: bytes) -> ToProxy:
    message: ToProxy = _decode(data, ToProxy)
    return message


def pack_ids(ids: Any) -> bytes:
    return np.asarray(ids, "<i4").tobytes()


def unpack_ids(data: bytes) -> np.ndarray[Any, np.dtype[np.int32]]:
    _whole(data)
    return np.frombuffer(data, "<i4").astype(np.int32, copy=sys.byteorder == "big")


def sampling_fields(sampling: Sampling) -> dict[str, Any]:
    return structs.asdict(structs.replace(sampling, conversation=None))


def sampling_of(fields: dict[str, Any]) -> Sampling:
    try:
        return msgspec.convert(fields, Sampling)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"sampling parameters: {error}") from error


def frame_of(call: int, number: int, chunk: Chunk) -> Frame:
    """Raises EngineRefusal if the tokens alone, with what the agent requests of each, are too large
    for a message."""
    frame = Frame(
        call=call,
        number=number,
        ids=pack_ids(chunk.ids),
        logprobs=np.asarray(chunk.logprobs, "<f4").tobytes(),
        top_logprobs=chunk.top_logprobs,
        finish=chunk.finish_reason,
        stop=chunk.stop_reason,
        versions=tuple((span.version, span.start, span.end) for span in chunk.versions),
        routed_experts=_bounded(routed_experts.dump(chunk.routed_experts), EXPERTS_BYTES),
        alternatives=_bounded(alternatives.dump(chunk.alternatives), ALTERNATIVES_BYTES),
    )
    if len(chunk.ids) > MANY_TOKENS and len(encode(frame)) > FRAME_BYTES:
        frame.routed_experts = frame.alternatives = None
        if len(encode(frame)) > FRAME_BYTES:
            raise EngineRefusal(
                f"the answer of {len(chunk.ids)} tokens with their top_logprobs is too large for a "
                "message of the relay; stream it, or request fewer top_logprobs"
            )
    return frame


def chunk_of(frame: Frame) -> Chunk:
    """Raises ProtocolError when the numbers of ids and log-probabilities differ, or the finish
    reason is unknown."""
    if len(frame.ids) != len(frame.logprobs):
        raise ProtocolError(
            f"call {frame.call}: {len(frame.ids) // 4} ids but "
            f"{len(frame.logprobs) // 4} log-probabilities"
        )
    _whole(frame.logprobs)
    if frame.finish is not None and frame.finish not in set(FinishReason):
        raise ProtocolError(f"call {frame.call}: unknown finish reason {frame.finish[:40]!r}")
    return Chunk(
        ids=unpack_ids(frame.ids).tolist(),
        logprobs=np.frombuffer(frame.logprobs, "<f4").tolist(),
        top_logprobs=frame.top_logprobs,
        finish_reason=None if frame.finish is None else FinishReason(frame.finish),
        stop_reason=frame.stop,
        versions=tuple(VersionSpan(*span) for span in frame.versions),
        routed_experts=_experts(frame),
        alternatives=_alternatives(frame),
    )


def _bounded(data: bytes | None, most: int) -> bytes | None:
    return None if data is None or len(data) > most else data


def _experts(frame: Frame) -> RoutedExperts | None:
    try:
        return routed_experts.load(frame.routed_experts)
    except ValueError as error:
        raise ProtocolError(f"call {frame.call}: unreadable routed experts: {error}") from error


def _alternatives(frame: Frame) -> Alternatives | None:
    try:
        return alternatives.load(frame.alternatives)
    except ValueError as error:
        raise ProtocolError(f"call {frame.call}: unreadable alternatives: {error}") from error


def _decode(data: bytes, kind: Any) -> Any:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"cannot decode a message of {len(data)} bytes: {error}") from error


def _whole(data: bytes) -> None:
    if len(data) % 4:
        raise ProtocolError(f"an array of {len(data)} bytes is not a whole number of 32-bit items")
