"""Prompts in the binary route (`frames.py`): one that extends its session's last prompt is sent as
the new ids and the digest of what they extend.

The digest covers all ids before, so that the two sides cannot mean different ones. Invariant: the
server gets exactly the prompt that the client had, or says that it does not know what it extends;
then the client sends it as a whole. Imports nothing that a vLLM server does not have.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

import numpy as np

from proxy.engines.last_prompts import LIMIT_BYTES, MIN_TOKENS, LastPrompts
from proxy.extras.binary_route.frames import ID
from proxy.records import Ids

DIGEST_BYTES = 16


class UnknownPrefixError(Exception):
    """The server does not have what a part extends."""


class SentPrompts:
    """The client's side of one connection."""

    def __init__(self) -> None:
        self._last = LastPrompts[bytes]()

    def __len__(self) -> int:
        return len(self._last)

    def part(self, ids: Ids, session_id: str) -> tuple[bytes, bytes]:
        """The digest of what the part extends (empty: nothing), and the ids to send. Parts are to
        be sent in the order of the calls of this method."""
        if len(ids) < MIN_TOKENS:
            return b"", _packed(ids)
        known, prefix = self._last.extended_by(ids, session_id) or (0, b"")
        new = _packed(ids[known:])
        self._last.keep(ids, session_id, digest(prefix, new), DIGEST_BYTES)
        return prefix, new

    def forget(self, session_id: str) -> None:
        """Frees the session's prompt, if one is kept: its next one is sent as a whole."""
        self._last.forget(session_id)


class ReceivedPrompts:
    """The server's side of one connection. Keeps at most `limit_bytes`."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._bytes = 0
        self._kept: OrderedDict[bytes, Ids] = OrderedDict()

    def whole(self, prefix: bytes, new: bytes) -> Ids:
        """The prompt of a part. Raises UnknownPrefixError."""
        ids: Ids = np.frombuffer(new, ID)
        if prefix:
            if prefix not in self._kept:
                raise UnknownPrefixError
            before = self._kept.pop(prefix)
            self._bytes -= before.nbytes
            ids = np.concatenate([before, ids])
        if len(ids) >= MIN_TOKENS:
            self._keep(digest(prefix, new), ids)
        return ids

    def _keep(self, name: bytes, ids: Ids) -> None:
        if name in self._kept:  # another session has the same prompt
            self._bytes -= self._kept.pop(name).nbytes
        self._kept[name] = ids
        self._bytes += ids.nbytes
        while self._bytes > self._limit_bytes:
            self._bytes -= self._kept.popitem(last=False)[1].nbytes


def digest(prefix: bytes, new: bytes) -> bytes:
    """Identifies the prompt that begins with the one that `prefix` identifies and ends with
    `new`."""
    return blake2b(prefix + new, digest_size=DIGEST_BYTES).digest()


def _packed(ids: Ids) -> bytes:
    return np.ascontiguousarray(ids, ID).tobytes()
