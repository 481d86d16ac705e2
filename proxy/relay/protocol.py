"""What the proxy and a relay worker say to each other: msgpack messages in binary frames.

Ids travel as little-endian int32 and log-probabilities as little-endian float32, raw, so that
what the proxy records is bit for bit what the worker's engine gave.

Invariant: the frames of a call are numbered from 0 without gaps. The worker keeps a frame until
the proxy has taken it, so that after a reconnect it can be sent again, and never keeps more than
the proxy's `window` of them: a reader that does not keep up stops the engine's stream.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import msgspec
import numpy as np

from proxy.engines.protocol import Chunk, Sampling
from proxy.records import FinishReason, VersionSpan

PROTOCOL_VERSION = 1
PATH = "/relay"

FRAME_BYTES = 32 * 2**20
"""Largest message: a prompt of 4 M tokens and some (int32), the longest context in use."""


class Fingerprint(msgspec.Struct, frozen=True, array_like=True):
    """Which model a side was given; equal on both or the worker is refused. Hex SHA-256."""

    tokenizer: str
    architecture: str


class Hello(msgspec.Struct, tag="hello", array_like=True):
    """The worker's first message on every connection."""

    protocol: int
    name: str
    incarnation: str
    """Random, one per process of the worker: a reconnect has the same, a restart another."""
    fingerprint: Fingerprint
    model: str | None
    version: int
    max_context_tokens: int | None
    max_calls: int
    calls: tuple[int, ...]
    """Calls that the worker still holds frames of."""


class Welcome(msgspec.Struct, tag="welcome", array_like=True):
    """The handshake succeeded."""

    window: int
    """Frames per call that the worker may hold untaken."""
    grace_s: float
    """For how long both sides keep calls alive without a connection."""
    resumed: dict[int, int]
    """Call → the number of the frame that the proxy wants next. Calls not named are over."""


class Refuse(msgspec.Struct, tag="refuse", array_like=True):
    """The handshake failed for good: trying again would fail again."""

    reason: str


class Generate(msgspec.Struct, tag="generate", array_like=True):
    call: int
    request_id: str
    prompt: bytes
    sampling: dict[str, Any]
    cache_salt: str | None
    stream: bool


class Frame(msgspec.Struct, tag="frame", array_like=True):
    """A chunk of a call, or with `error` its failure; `finish` or `error` makes it the last."""

    call: int
    number: int
    ids: bytes = b""
    logprobs: bytes = b""
    top_logprobs: list[list[tuple[int, float]]] | None = None
    finish: str | None = None
    stop: int | str | None = None
    versions: tuple[tuple[int, int, int], ...] = ()
    error: str | None = None
    refused: bool = False
    """With `error`: the engine refuses the request itself; another replica would, too."""

    @property
    def last(self) -> bool:
        return self.finish is not None or self.error is not None


class Taken(msgspec.Struct, tag="taken", array_like=True):
    """The proxy's reader has taken every frame of the call below `number`."""

    call: int
    number: int


class End(msgspec.Struct, tag="end", array_like=True):
    """The proxy wants no more of the call: abort it if it runs, and forget it."""

    call: int


class Check(msgspec.Struct, tag="check", array_like=True):
    """Is the worker's engine well, and which weights has it?"""

    number: int


class Health(msgspec.Struct, tag="health", array_like=True):
    """The answer to the `Check` of the same number."""

    number: int
    version: int
    error: str | None = None


class Leave(msgspec.Struct, tag="leave", array_like=True):
    """The worker finishes the calls it has, takes no more, and then closes with code 1000."""


ToWorker = Welcome | Refuse | Generate | Taken | End | Check
ToProxy = Hello | Frame | Health | Leave


class ProtocolError(Exception):
    """The other side sent what the protocol does not allow; the connection is closed."""


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
    return dataclasses.asdict(sampling)


def sampling_of(fields: dict[str, Any]) -> Sampling:
    try:
        return msgspec.convert(fields, Sampling)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"sampling parameters: {error}") from error


def frame_of(call: int, number: int, chunk: Chunk) -> Frame:
    return Frame(
        call=call,
        number=number,
        ids=pack_ids(chunk.ids),
        logprobs=np.asarray(chunk.logprobs, "<f4").tobytes(),
        top_logprobs=chunk.top_logprobs,
        finish=chunk.finish_reason,
        stop=chunk.stop_reason,
        versions=tuple((span.version, span.start, span.end) for span in chunk.versions),
    )


def chunk_of(frame: Frame) -> Chunk:
    """Raises ProtocolError when ids and log-probabilities do not match one to one."""
    if len(frame.ids) != len(frame.logprobs):
        raise ProtocolError(
            f"call {frame.call}: {len(frame.ids) // 4} ids but "
            f"{len(frame.logprobs) // 4} log-probabilities"
        )
    _whole(frame.logprobs)
    return Chunk(
        ids=unpack_ids(frame.ids).tolist(),
        logprobs=np.frombuffer(frame.logprobs, "<f4").tolist(),
        top_logprobs=frame.top_logprobs,
        finish_reason=None if frame.finish is None else FinishReason(frame.finish),
        stop_reason=frame.stop,
        versions=tuple(VersionSpan(*span) for span in frame.versions),
    )


def _decode(data: bytes, kind: Any) -> Any:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"a message of {len(data)} bytes: {error}") from error


def _whole(data: bytes) -> None:
    if len(data) % 4:
        raise ProtocolError(f"an array of {len(data)} bytes is not a whole number of 32-bit items")
