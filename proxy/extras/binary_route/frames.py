"""The messages of the binary route of a vLLM server, in msgpack in binary WebSocket frames.

All calls of a client share one connection. `vllm.py` is the server's side, and
`client.py` the client's. Ids are raw little-endian int32, and log-probabilities raw
little-endian float64, in which the float32 of an engine is exact. Imports nothing that a vLLM
server does not have.

Invariant: what a `Sampled` holds of a call comes after what the ones before it held, and its
`CallEnd` is the last.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

PATH = "/inference/v1/frames"
"""Below `/inference`, which vLLM's `--api-key` guards."""
ID = np.dtype("<i4")
LOGPROB = np.dtype("<f8")


class StartCall(msgspec.Struct, tag="start", array_like=True, gc=False):
    """Asks for an answer."""

    call: int
    """The client's number of the call on this connection."""
    prompt: bytes
    """The token ids; with `prefix` only those after it."""
    request: dict[str, Any]
    """The other fields of the body of `POST /inference/v1/generate`."""
    prefix: bytes = b""
    """Digest of the prompt that this one extends (`prompt_parts.py`); empty: it is whole."""


class CancelCall(msgspec.Struct, tag="cancel", array_like=True, gc=False):
    """The client does not want the rest of the call, and ignores what is still sent of it."""

    call: int


class CallEnd(msgspec.Struct, array_like=True, gc=False):
    """The end of a call: either `finish`, `error` or `unknown_prefix` is set."""

    call: int
    finish: str | None = None
    stop: int | str | None = None
    versions: list[tuple[str, int, int]] = []
    """Label of the weights, and the tokens `[start, end)` that they sampled."""
    routed_experts: bytes | None = None
    """`.npy`, see `proxy/records/routed_experts.py`."""
    error: str | None = None
    code: int = 500
    """HTTP status of the error."""
    unknown_prefix: bool = False
    """The call was not begun, because the server does not have what its prompt extends."""


class Sampled(msgspec.Struct, array_like=True, gc=False):
    """The tokens that all calls have got since the message before, and the calls that have ended.

    C: calls with tokens, T: their tokens, A: the alternatives of all tokens.
    """

    calls: bytes
    """`[C]` int32."""
    counts: bytes
    """`[C]` int32: the number of tokens of each."""
    ids: bytes
    """`[T]` int32."""
    logprobs: bytes
    """`[T]` float64."""
    alternative_counts: bytes = b""
    """`[T]` int32; empty if no call requests alternatives."""
    alternative_ids: bytes = b""
    """`[A]` int32."""
    alternative_logprobs: bytes = b""
    """`[A]` float64."""
    ends: list[CallEnd] = []


Request = StartCall | CancelCall
read_request = msgspec.msgpack.Decoder(Request).decode
read_sampled = msgspec.msgpack.Decoder(Sampled).decode
write = msgspec.msgpack.Encoder().encode
