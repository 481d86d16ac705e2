"""A call in flight at a relay worker, on the proxy's side."""

from __future__ import annotations

import asyncio

from proxy.engines.protocol import Chunk
from proxy.errors import EngineError, EngineRefusal, MissingAdapter, ProxyError
from proxy.extras.relay.protocol import Frame, Generate, chunk_of


class RelayCall:
    """A call in flight, with the frames that its reader has not taken yet."""

    def __init__(self, request: Generate) -> None:
        self.request = request
        self.items: asyncio.Queue[Chunk | ProxyError] = asyncio.Queue()
        self.received = 0
        self.complete = False

    def put(self, frame: Frame) -> None:
        if frame.error is None:
            self.items.put_nowait(chunk_of(frame))
        else:
            self.items.put_nowait(_failure(frame, frame.error))
        self.received = frame.number + 1
        self.complete = frame.last
        self.request.prompt = b""

    def cut(self, reason: str, status: int = 503) -> None:
        if not self.complete:
            self.complete = True
            self.items.put_nowait(EngineError(reason, status=status))


def _failure(frame: Frame, error: str) -> ProxyError:
    if frame.refused:
        return EngineRefusal(error)
    return MissingAdapter(error) if frame.lacks_adapter else EngineError(error)
