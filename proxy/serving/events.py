"""Sends a call's answers to one agent as server-sent events, while they are sampled.

    AT WORK ⇄ FOLLOWING     at the end: AT WORK

FOLLOWING   The task of the request sleeps, and the code that samples a piece also writes it to the
            connection (`_follow`), because waking a task for each token costs more than the token.
AT WORK     The task writes, and may wait: for the head of the response, for an agent that reads
            slowly, at the end. The pieces that come meanwhile leave in one write.

Invariant: every piece is sent once and in order, and nothing before the first one. `_follow` writes
nothing while the connection's buffer is full. A fault of one connection ends only its response.
"""

from __future__ import annotations

import asyncio

from aiohttp import HttpVersion11, web

from proxy.config import LimitsConfig
from proxy.errors import ProxyError
from proxy.http.server import read_in_time
from proxy.serving.call import Watcher
from proxy.wire.dialect import KEEP_ALIVE, StreamWriter

MAX_JOINED = 256
"""Pieces per write: about as many bytes as a connection's buffer takes (64 KiB)."""


class EventSender:
    """The streamed response to one request. Await `send` once."""

    def __init__(
        self, request: web.Request, watcher: Watcher, writer: StreamWriter, limits: LimitsConfig
    ) -> None:
        self._request = request
        self._connection = request.protocol
        self._can_write = False
        """Whether chunks can be written: the head was sent, and it announces chunks."""
        self._watcher = watcher
        self._pieces = watcher.call.stream.pieces
        self._writer = writer
        self._limits = limits
        self._keep_alive: bytes = getattr(writer, "keep_alive", KEEP_ALIVE)
        self._loop = asyncio.get_running_loop()
        self._sent = 0
        """Number of pieces that were sent."""
        self._sent_at = self._loop.time()
        self._following: asyncio.Future[bool] | None = None
        """What the task waits for while it is FOLLOWING: whether a keep-alive is due."""
        self._response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
            }
        )

    async def send(self) -> web.StreamResponse:
        """Sends the pieces until the call ends, and then the terminal events.

        Raises:
            ConnectionError: the agent has left, or reads nothing for `limits.unread_s`.
            ProxyError: the call failed before anything was sent.
        """
        await self._send_pieces()
        try:
            end = self._writer.end(await self._watcher.outcomes())
        except ProxyError as error:
            if not self._response.prepared:
                raise
            end = self._writer.error(error)
        end = await self._begun(end)
        async with read_in_time(self._request, self._limits.unread_s, len(end)):
            await self._response.write_eof(end)
        return self._response

    async def _send_pieces(self) -> None:
        """Returns when the call has ended and its pieces are sent, with keep-alives in silence."""
        stream = self._watcher.call.stream
        stream.followers.append(self._follow)
        self._silence = self._loop.call_later(self._limits.keep_alive_s, self._look)
        try:
            while True:
                if self._sent < len(self._pieces):
                    await self._write(self._unsent())
                elif stream.ended:
                    return
                else:
                    self._following = self._loop.create_future()
                    if await self._following and self._watcher.call.turns:
                        await self._write(self._keep_alive)
        finally:
            self._silence.cancel()
            stream.followers.remove(self._follow)

    def _follow(self) -> None:
        """Writes the new pieces, or wakes the task if it must. Never raises."""
        following = self._following
        if following is None or following.done():  # the task is at work and sends them
            return
        if self._sent == len(self._pieces):  # the call has ended
            following.set_result(False)
            return
        transport = self._connection.transport
        if not self._can_write or self._connection.writing_paused or transport is None:
            following.set_result(False)
            return
        try:
            data = self._unsent()
        except Exception as error:  # noqa: BLE001 - raised again in the task, whose response it ends
            following.set_exception(error)
            return
        if data:  # an empty chunk would end the response
            self._sent_at = self._loop.time()
            transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _unsent(self) -> bytes:
        """The events of the pieces that were not sent; empty if the dialect shows none of them, as
        of reasoning that is hidden."""
        begun, end = self._sent, min(len(self._pieces), self._sent + MAX_JOINED)
        self._sent = end
        if end - begun == 1:
            return self._writer.piece(self._pieces[begun])
        return b"".join(map(self._writer.piece, self._pieces[begun:end]))

    async def _write(self, data: bytes) -> None:
        data = await self._begun(data)
        if not data:
            return
        self._sent_at = self._loop.time()
        async with read_in_time(self._request, self._limits.unread_s, len(data)):
            await self._request.writer.drain()
            await self._response.write(data)

    async def _begun(self, data: bytes) -> bytes:
        """`data`, after the beginning of the stream if nothing was sent before it."""
        if self._response.prepared:
            return data
        await self._response.prepare(self._request)
        self._can_write = self._request.version == HttpVersion11
        call = self._watcher.call
        return self._writer.start(call.prompt_tokens, call.turns[0]) + data

    def _look(self) -> None:
        """Wakes the task after each `keep_alive_s` of silence. A stream has one timer."""
        limit_s = self._limits.keep_alive_s
        left = self._sent_at + limit_s - self._loop.time()
        if left <= 0:
            if self._following is not None and not self._following.done():
                self._following.set_result(True)
            left = limit_s
        self._silence = self._loop.call_later(left, self._look)
