"""The client of the binary route of a vLLM server (`vllm.py`).

All calls share one WebSocket, and each message has the new tokens of all of them. Invariant: a call
gets its tokens in order and completely, or an EngineError that says why not; and one that does not
want them to their end is cancelled at the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import aiohttp
import msgspec
import numpy as np

from proxy.engines.address import EngineAddress
from proxy.errors import EngineError, UnreachableEngine
from proxy.extras.binary_route.frames import (
    ID,
    LOGPROB,
    PATH,
    CallEnd,
    CancelCall,
    Request,
    Sampled,
    StartCall,
    read_sampled,
    write,
)
from proxy.extras.binary_route.prompt_parts import SentPrompts, UnknownPrefixError
from proxy.machine.direct_hosts import proxy_for
from proxy.records import Ids

MAX_PROMPT_TOKENS = 3 * 2**20
"""12 MiB of the 16 MiB that a message to a vLLM server may have."""
MAX_MESSAGE_BYTES = 2**30
CANCEL_TIMEOUT_S = 30.0
"""Long, because a server that is slow is not dead."""
CLOSE_TIMEOUT_S = 1.0
"""For the server's reply to the end of the connection, on which nothing depends."""

Ranked = list[list[tuple[int, float]]]
"""For each token the ids and log-probabilities of the sampled one and the most probable ones."""

Take = Callable[[list[int], list[float], Ranked | None, CallEnd | None], None]
"""Takes new tokens with their log-probabilities and, if any call requests them, alternatives; and
the end of the call. An error that it raises ends the call."""


class FramesClient:
    """Implements `proxy.engines.vllm.BinaryRoute`.

    Example:
    frames = FramesClient(EngineAddress.parse(url))
    if await frames.connect():
        await frames.sample(prompt_ids, request, take)
    """

    max_prompt_tokens = MAX_PROMPT_TOKENS

    def __init__(
        self,
        address: EngineAddress,
        *,
        connect_timeout_s: float = 5.0,
        stall_timeout_s: float = 600.0,
    ) -> None:
        """`stall_timeout_s`: a call fails if it gets no token for this long."""
        self._address = address
        self._connect_timeout_s = connect_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._http: aiohttp.ClientSession | None = None
        self._connection: _Connection | None = None
        self._opening: asyncio.Task[bool] | None = None

    async def connect(self) -> bool:
        """Connects, unless it is connected. False if the server does not have the route.

        Raises EngineError: the server cannot be reached.
        """
        if self._connection is not None and not self._connection.is_lost:
            return True
        if self._opening is None:
            self._opening = asyncio.create_task(self._open())
            self._opening.add_done_callback(self._opened)
        return await asyncio.shield(self._opening)

    async def sample(self, prompt_ids: Ids, request: dict[str, Any], take: Take) -> None:
        """Passes what the engine samples to `take`, from the code that receives it. Returns after
        the end of the call. `request` has the fields of vLLM's route besides the ids.

        Raises EngineError, and what `take` raises.
        """
        assert self._connection is not None
        await self._connection.sample(prompt_ids, request, take)

    def forget(self, session_id: str) -> None:
        """Frees what is kept of a session that has ended."""
        if self._connection is not None:
            self._connection.sent.forget(session_id)

    async def close(self) -> None:
        """Closes the connection. Calls that are running fail."""
        if self._opening is not None:
            self._opening.cancel()
        if self._connection is not None:
            await self._connection.close()
        if self._http is not None:
            await self._http.close()

    async def _open(self) -> bool:
        if self._http is None:
            connector = aiohttp.TCPConnector(limit=0)
            proxy = proxy_for(self._address.url)
            self._http = aiohttp.ClientSession(connector=connector, proxy=proxy)
        url = self._address.url
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                socket = await self._http.ws_connect(
                    url + PATH,
                    headers=self._address.headers,
                    max_msg_size=MAX_MESSAGE_BYTES,
                    timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_TIMEOUT_S),
                )
        except aiohttp.WSServerHandshakeError:
            return False
        except (aiohttp.ClientError, OSError) as error:
            words = f"engine {url}{PATH}: {error or type(error).__name__}"
            raise UnreachableEngine(words) from error
        self._connection = _Connection(socket, url, self._stall_timeout_s)
        return True

    def _opened(self, task: asyncio.Task[bool]) -> None:
        self._opening = None
        if not task.cancelled():
            task.exception()  # those that wait for the task raise it


@dataclass(slots=True)
class _Call:
    take: Take
    ended: asyncio.Future[None]
    heard_at: float

    def fail(self, error: Exception) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)
            self.ended.exception()  # its task may be cancelled before it raises it


class _Connection:
    def __init__(
        self, socket: aiohttp.ClientWebSocketResponse, url: str, stall_timeout_s: float
    ) -> None:
        self._socket = socket
        self._url = url
        self._stall_timeout_s = stall_timeout_s
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, _Call] = {}
        self._last_number = 0
        self.sent = SentPrompts()
        self._watch: asyncio.TimerHandle | None = None
        self._heard_at = self._loop.time()
        self._reader = asyncio.create_task(self._read())
        self.is_lost = False

    async def sample(self, prompt_ids: Ids, request: dict[str, Any], take: Take) -> None:
        session_id = request["request_id"].rpartition("#")[0]
        try:
            await self._sample(prompt_ids, session_id, request, take)
        except UnknownPrefixError:  # the server had no room for it
            self.sent.forget(session_id)
            await self._sample(prompt_ids, session_id, request, take)

    async def _sample(
        self, prompt_ids: Ids, session_id: str, request: dict[str, Any], take: Take
    ) -> None:
        if self.is_lost:  # since the call began to wait for the connection
            raise self._fault("closed the connection")
        self._last_number += 1
        number = self._last_number
        call = _Call(take, self._loop.create_future(), self._loop.time())
        self._calls[number] = call
        if self._watch is None:
            self._watch = self._loop.call_later(self._stall_timeout_s, self._look)
        prefix, new = self.sent.part(prompt_ids, session_id)
        try:
            await self._send(StartCall(number, new, request, prefix))
            await call.ended
        except BaseException:
            if self._calls.pop(number, None) is not None:
                await self._cancel(number)
            raise

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _send(self, request: Request) -> None:
        """Raises EngineError."""
        try:
            await self._socket.send_bytes(write(request))
        except (aiohttp.ClientError, OSError) as error:
            raise self._fault(f"closed the connection: {error}") from error

    async def _cancel(self, number: int) -> None:
        """Cancels a call that has not ended. Without a connection it has."""
        with contextlib.suppress(EngineError, TimeoutError):
            async with asyncio.timeout(CANCEL_TIMEOUT_S):
                await self._send(CancelCall(number))

    async def _read(self) -> None:
        """Passes on what arrives. With the connection all its calls end."""
        words = "closed the connection in the middle of an answer"
        try:
            async for message in self._socket:
                if message.type is not aiohttp.WSMsgType.BINARY:
                    words = f"sent a message of the type {message.type.name}"
                    break
                self._pass_on(read_sampled(message.data))
        except (msgspec.DecodeError, ValueError) as error:
            words = f"sent an invalid message: {error}"
        finally:
            self.is_lost = True
            if self._watch is not None:
                self._watch.cancel()
            while self._calls:
                self._calls.popitem()[1].fail(self._fault(words))
            await self._socket.close()

    def _pass_on(self, sampled: Sampled) -> None:
        """Raises ValueError if the columns do not belong together."""
        calls, counts, ids = (
            np.frombuffer(column, ID).tolist()
            for column in (sampled.calls, sampled.counts, sampled.ids)
        )
        logprobs = np.frombuffer(sampled.logprobs, LOGPROB).tolist()
        sizes = (len(ids), len(calls), min(counts, default=0) >= 0)
        if sizes != (len(logprobs), len(counts), True) or sum(counts) != len(ids):
            raise ValueError(f"{len(ids)} ids, {len(logprobs)} log-probabilities, {counts} tokens")
        ranked = _ranked(sampled, len(ids)) if sampled.alternative_counts else None
        ends = {end.call: end for end in sampled.ends}
        last = {number: at for at, number in enumerate(calls)} if ends else {}
        now, start = self._loop.time(), 0
        self._heard_at = now
        for at, (number, count) in enumerate(zip(calls, counts, strict=True)):
            stop = start + count
            own = None if ranked is None else ranked[start:stop]
            end = ends.pop(number, None) if last.get(number) == at else None
            self._give(number, now, ids[start:stop], logprobs[start:stop], own, end)
            start = stop
        for number, end in ends.items():
            self._give(number, now, [], [], None, end)

    def _give(
        self,
        number: int,
        now: float,
        ids: list[int],
        logprobs: list[float],
        ranked: Ranked | None,
        end: CallEnd | None,
    ) -> None:
        call = self._calls.get(number)
        if call is None or call.ended.done():  # cancelled, or about to be
            return
        call.heard_at = now
        if end is not None:
            del self._calls[number]
            if end.unknown_prefix:
                call.fail(UnknownPrefixError())
                return
        try:
            call.take(ids, logprobs, ranked, end)
        except Exception as error:  # noqa: BLE001 - raised again in the call's task
            call.fail(error)
            return
        if end is not None:
            call.ended.set_result(None)

    def _look(self) -> None:
        """Fails the calls that got nothing for `stall_timeout_s`, and looks again when the next one
        would have. If no call got anything, the connection may be dead, and is not used again."""
        now, self._watch = self._loop.time(), None
        waiting = [call for call in self._calls.values() if not call.ended.done()]
        for call in waiting:
            if call.heard_at + self._stall_timeout_s <= now:
                call.fail(self._fault("did not answer in time"))
        heard = [call.heard_at for call in waiting if not call.ended.done()]
        if len(heard) < len(waiting) and self._heard_at + self._stall_timeout_s <= now:
            self.is_lost = True
            self._reader.cancel()
        elif heard:
            self._watch = self._loop.call_at(min(heard) + self._stall_timeout_s, self._look)

    def _fault(self, words: str) -> EngineError:
        return EngineError(f"engine {self._url}{PATH} {words}")


def _ranked(sampled: Sampled, tokens: int) -> Ranked:
    """Those of each of the `tokens` tokens. Raises ValueError if the columns do not belong
    together."""
    counts = np.frombuffer(sampled.alternative_counts, ID).tolist()
    ids = np.frombuffer(sampled.alternative_ids, ID).tolist()
    logprobs = np.frombuffer(sampled.alternative_logprobs, LOGPROB).tolist()
    if len(counts) != tokens or min(counts) < 0 or sum(counts) != len(ids):
        raise ValueError(f"{len(ids)} alternatives of {tokens} tokens, not {sum(counts)}")
    pairs, bounds = list(zip(ids, logprobs, strict=True)), [0, *accumulate(counts)]
    return [pairs[start:stop] for start, stop in pairwise(bounds)]
