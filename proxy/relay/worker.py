"""The worker's side of the relay: connects out to the proxy and serves its calls from an engine.

Invariant: a call is given to the engine once. While the connection is away the call goes on, its
frames kept up to the proxy's window, and they are sent when the connection is back; after the
proxy's grace time, or when the proxy no longer wants it, the call is aborted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
from collections import deque
from dataclasses import dataclass

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from proxy.engines.protocol import Engine
from proxy.errors import EngineError, RequestError
from proxy.relay.protocol import (
    FRAME_BYTES,
    PATH,
    PROTOCOL_VERSION,
    Check,
    End,
    Fingerprint,
    Frame,
    Generate,
    Health,
    Hello,
    Leave,
    ProtocolError,
    Refuse,
    Taken,
    ToProxy,
    ToWorker,
    Welcome,
    decode_to_worker,
    encode,
    frame_of,
    sampling_of,
    unpack_ids,
)

log = logging.getLogger(__name__)

HANDSHAKE_S = 10.0


class WorkerRefused(Exception):
    """The proxy will not have this worker, however often it tries."""


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Example: WorkerSettings(proxy="wss://proxy.example.org", name="gpu-0", token="…")"""

    proxy: str
    """`ws://` or `wss://`, host and port; a path in front of `/relay` is kept."""
    name: str
    token: str
    max_calls: int = 256
    silence_s: float = 15.0
    """A connection over which no pong comes for so long is dead."""
    backoff_s: float = 0.5
    """Before the first try to connect again; doubles up to `max_backoff_s`, and starts over once
    a handshake has succeeded."""
    max_backoff_s: float = 30.0
    drain_s: float = 300.0
    """How long calls may still take once the worker is told to stop."""


class RelayWorker:
    """Example: `await RelayWorker(engine, fingerprint(model), settings).run()`"""

    def __init__(self, engine: Engine, fingerprint: Fingerprint, settings: WorkerSettings) -> None:
        self._engine = engine
        self._fingerprint = fingerprint
        self._settings = settings
        self._incarnation = secrets.token_hex(16)
        self._calls: dict[int, _Call] = {}
        self._window = 1
        self._grace_s = 0.0
        self._expiry: asyncio.TimerHandle | None = None
        self._socket: ClientConnection | None = None
        self._outbox: asyncio.Queue[ToProxy] | None = None
        """Both None while there is no connection."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._stop = asyncio.Event()
        self._tries = 0

    async def run(self) -> None:
        """Until `stop`, and the calls in flight then have ended.

        Raises:
            WorkerRefused: wrong token, protocol, model, or a name in use; one line says which.
        """
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            serving = tasks.create_task(self._serve())
            stopping = tasks.create_task(self._stop.wait())
            await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if not serving.done():
                await self._drain()
                if self._socket is not None:
                    await self._socket.close()
                serving.cancel()
            self._abandon()
        if not serving.cancelled():
            raise serving.result()

    def stop(self) -> None:
        """Takes no more calls, finishes those in flight, and ends `run`."""
        self._stop.set()

    async def _serve(self) -> WorkerRefused:
        while True:
            try:
                reason = await self._connection()
            except WorkerRefused as refused:
                return refused
            finally:
                self._socket = self._outbox = None
            self._expiry = asyncio.get_running_loop().call_later(self._grace_s, self._abandon)
            delay_s = self._backoff()
            log.warning("relay: %s; connecting again in %.1f s", reason, delay_s)
            await asyncio.sleep(delay_s)

    def _backoff(self) -> float:
        settings = self._settings
        delay_s = min(settings.max_backoff_s, settings.backoff_s * 2.0 ** min(self._tries, 16))
        self._tries += 1
        return delay_s * random.uniform(0.5, 1.0)

    async def _connection(self) -> str:
        """One connection from its handshake to its end; the answer is why it ended."""
        silence_s = self._settings.silence_s
        try:
            async with connect(
                self._settings.proxy.rstrip("/") + PATH,
                additional_headers={"Authorization": f"Bearer {self._settings.token}"},
                open_timeout=HANDSHAKE_S,
                close_timeout=1.0,
                ping_interval=silence_s / 3,
                ping_timeout=silence_s * 2 / 3,
                max_size=FRAME_BYTES,
                compression=None,
            ) as socket:
                await self._converse(socket)
                return "the proxy closed the connection"
        except InvalidStatus as error:
            status = error.response.status_code
            if status in (401, 403, 404):
                words = error.response.body.decode(errors="replace").strip()
                raise WorkerRefused(f"{self._settings.proxy} answered {status}: {words}") from error
            return f"{self._settings.proxy} answered {status}"
        except (OSError, ConnectionClosed, InvalidHandshake) as error:
            return f"{self._settings.proxy}: {error or type(error).__name__}"

    async def _converse(self, socket: ClientConnection) -> None:
        await socket.send(encode(await self._hello()))
        async with asyncio.timeout(HANDSHAKE_S):
            welcome = decode_to_worker(await _binary(socket))
        if isinstance(welcome, Refuse):
            raise WorkerRefused(welcome.reason)
        if not isinstance(welcome, Welcome):
            raise ProtocolError(f"{type(welcome).__name__} instead of a welcome")
        outbox = self._resume(welcome)
        self._socket = socket
        log.info("relay: connected to %s as %s", self._settings.proxy, self._settings.name)
        sender = asyncio.create_task(_send(socket, outbox))
        try:
            async for data in socket:
                self._receive(decode_to_worker(_bytes(data)))
        finally:
            sender.cancel()
            await asyncio.wait([sender])

    async def _hello(self) -> Hello:
        info = self._engine.info
        return Hello(
            protocol=PROTOCOL_VERSION,
            name=self._settings.name,
            incarnation=self._incarnation,
            fingerprint=self._fingerprint,
            model=info.model,
            version=info.version,
            max_context_tokens=info.max_context_tokens,
            max_calls=self._settings.max_calls,
            calls=tuple(self._calls),
        )

    def _resume(self, welcome: Welcome) -> asyncio.Queue[ToProxy]:
        self._tries = 0
        self._window, self._grace_s = welcome.window, welcome.grace_s
        if self._expiry is not None:
            self._expiry.cancel()
        for number in set(self._calls) - set(welcome.resumed):
            self._end(number)
        self._outbox = outbox = asyncio.Queue[ToProxy]()
        for number, wanted in welcome.resumed.items():
            for frame in self._calls[number].kept:
                if frame.number >= wanted:
                    outbox.put_nowait(frame)
        if self._stop.is_set():
            outbox.put_nowait(Leave())
        return outbox

    def _receive(self, message: ToWorker) -> None:
        match message:
            case Generate():
                self._begin(message)
            case Taken():
                if call := self._calls.get(message.call):
                    call.taken(message.number)
            case End():
                self._end(message.call)
            case Check():
                self._tasks.create_task(self._check(message.number))
            case _:
                raise ProtocolError(f"{type(message).__name__} after the handshake")

    def _begin(self, request: Generate) -> None:
        if request.call in self._calls:
            raise ProtocolError(f"call {request.call} was begun twice")
        call = self._calls[request.call] = _Call(request.call)
        self._idle.clear()
        if len(self._calls) > self._settings.max_calls:
            self._post(call, Frame(request.call, 0, error="the worker has no room for the call"))
        else:
            call.task = self._tasks.create_task(self._sample(call, request))

    async def _sample(self, call: _Call, request: Generate) -> None:
        """Engine to proxy, no faster than the proxy's reader takes."""
        number = 0
        try:
            chunks = self._engine.generate(
                unpack_ids(request.prompt),
                sampling_of(request.sampling),
                request_id=request.request_id,
                cache_salt=request.cache_salt,
                stream=request.stream,
            )
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    await call.room(self._window)
                    self._post(call, frame_of(call.number, number, chunk))
                    number += 1
                    if chunk.finish_reason is not None:
                        return
            raise EngineError("the engine ended its stream without a finish_reason")
        except (EngineError, RequestError) as error:
            refused = isinstance(error, RequestError)
            await call.room(self._window)
            self._post(call, Frame(call.number, number, error=error.message, refused=refused))

    def _post(self, call: _Call, frame: Frame) -> None:
        call.kept.append(frame)
        if self._outbox is not None:
            self._outbox.put_nowait(frame)

    def _end(self, number: int) -> None:
        call = self._calls.pop(number, None)
        if call is not None and call.task is not None:
            call.task.cancel()
        if not self._calls:
            self._idle.set()

    async def _check(self, number: int) -> None:
        error = None
        try:
            await self._engine.check()
        except EngineError as failure:
            error = failure.message
        if self._outbox is not None:
            self._outbox.put_nowait(Health(number, self._engine.info.version, error))

    async def _drain(self) -> None:
        if self._outbox is not None:
            self._outbox.put_nowait(Leave())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), self._settings.drain_s)

    def _abandon(self) -> None:
        if self._calls:
            log.warning("relay: aborting %d calls that nobody waits for", len(self._calls))
        for number in list(self._calls):
            self._end(number)


class _Call:
    """A call that the worker serves: its task, and the frames that the proxy has not taken."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.task: asyncio.Task[None] | None = None
        self.kept: deque[Frame] = deque()
        self._room = asyncio.Event()

    async def room(self, window: int) -> None:
        while len(self.kept) >= window:
            self._room.clear()
            await self._room.wait()

    def taken(self, number: int) -> None:
        while self.kept and self.kept[0].number < number:
            self.kept.popleft()
        self._room.set()


async def _send(socket: ClientConnection, outbox: asyncio.Queue[ToProxy]) -> None:
    with contextlib.suppress(ConnectionClosed):
        while True:
            await socket.send(encode(await outbox.get()))


async def _binary(socket: ClientConnection) -> bytes:
    return _bytes(await socket.recv())


def _bytes(data: str | bytes) -> bytes:
    if isinstance(data, str):
        raise ProtocolError("a text message")
    return data
