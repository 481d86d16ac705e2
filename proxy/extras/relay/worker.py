"""The worker's side of the relay: connects to the proxy and serves its calls from an engine.

Invariant: a call is given to the engine once. While the connection is lost, the call continues; its
frames are kept and sent after the reconnect. The call is aborted when the grace time of the proxy
is over, or when the proxy ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
from collections import deque

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from proxy.engines.protocol import Chunk, Engine
from proxy.errors import EngineError, MissingAdapter, RequestError
from proxy.extras.relay.engine_weights import EngineWeights
from proxy.extras.relay.protocol import (
    FRAME_BYTES,
    PATH,
    PROTOCOL_VERSION,
    AbortCall,
    Check,
    Describe,
    Described,
    End,
    Fingerprint,
    Frame,
    Generate,
    Health,
    Hello,
    Leave,
    ProtocolError,
    Refuse,
    Serves,
    Taken,
    ToProxy,
    ToWorker,
    Weights,
    Welcome,
    decode_to_worker,
    encode,
    frame_of,
    sampling_of,
    unpack_ids,
)
from proxy.extras.relay.weight_updates import WeightUpdates
from proxy.extras.relay.weights.pull import WeightStore
from proxy.extras.relay.worker_config import WorkerConfig
from proxy.machine.direct_hosts import proxy_for

log = logging.getLogger(__name__)

HANDSHAKE_S = 10.0
BACKOFF_S = 0.5
"""Wait before the first reconnect. It doubles with each further attempt up to `MAX_BACKOFF_S`, and
is reset by a successful handshake."""
MAX_BACKOFF_S = 30.0


class WorkerRefused(Exception):
    """The proxy refuses this worker for good; another attempt would fail too."""


class RelayWorker:
    """Example: `await RelayWorker(engine, fingerprint(model), config).run()`"""

    def __init__(self, engine: Engine, fingerprint: Fingerprint, config: WorkerConfig) -> None:
        """
        Raises:
            ConfigurationError: no installed file system serves `weights_url`.
        """
        self._engine = engine
        url, key = config.weights_url, config.engine_api_key
        self._weights = WeightUpdates(
            EngineWeights(config.engine, api_key=key.get_secret_value() if key else None),
            None
            if url is None
            else WeightStore(url, config.weights_folder, fingerprint.architecture),
            self._report,
        )
        self._fingerprint = fingerprint
        self._config = config
        self._incarnation = secrets.token_hex(16)
        self._calls: dict[int, _Call] = {}
        self._window = 1
        self._grace_s = 0.0
        self._expiry: asyncio.TimerHandle | None = None
        """Ends the calls of a connection that was lost, unless it is replaced in time."""
        self._socket: ClientConnection | None = None
        self._outbox: asyncio.Queue[ToProxy] | None = None
        """`_socket` and `_outbox` are None while there is no connection."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._stop = asyncio.Event()
        self._tries = 0

    async def run(self) -> None:
        """Runs until `stop` is called and the calls in flight have ended.

        Raises:
            WorkerRefused: the proxy refuses the token, the protocol, the model or the name; the
                message names which.
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
            await self._weights.close()
        if not serving.cancelled():
            raise serving.result()

    def stop(self) -> None:
        """Accepts no more calls, finishes those in flight, and ends `run`."""
        self._stop.set()

    async def _serve(self) -> WorkerRefused:
        while True:
            try:
                reason = await self._connection()
            except WorkerRefused as refused:
                return refused
            finally:
                self._socket = self._outbox = None
            if self._expiry is None:  # counts from the loss, not from the last attempt to reconnect
                self._expiry = asyncio.get_running_loop().call_later(self._grace_s, self._abandon)
            delay_s = self._backoff()
            log.warning("relay: %s; reconnecting in %.1f s", reason, delay_s)
            await asyncio.sleep(delay_s)

    def _backoff(self) -> float:
        delay_s = min(MAX_BACKOFF_S, BACKOFF_S * 2.0 ** min(self._tries, 16))
        self._tries += 1
        return delay_s * random.uniform(0.5, 1.0)

    async def _connection(self) -> str:
        """Runs one connection from its handshake to its end; returns why it ended."""
        silence_s = self._config.silence_s
        token = self._config.token.get_secret_value()
        try:
            async with connect(
                self._config.proxy.rstrip("/") + PATH,
                additional_headers={"Authorization": f"Bearer {token}"},
                open_timeout=HANDSHAKE_S,
                close_timeout=1.0,
                ping_interval=silence_s / 3,
                ping_timeout=silence_s * 2 / 3,
                max_size=FRAME_BYTES,
                compression=None,
                proxy=proxy_for(self._config.proxy),
            ) as socket:
                await self._converse(socket)
                return "the proxy closed the connection"
        except InvalidStatus as error:
            status = error.response.status_code
            if status in (401, 403, 404):
                words = error.response.body.decode(errors="replace").strip()
                raise WorkerRefused(f"{self._config.proxy} answered {status}: {words}") from error
            return f"{self._config.proxy} answered {status}"
        except (OSError, ConnectionClosed, InvalidHandshake) as error:
            return f"{self._config.proxy}: {error or type(error).__name__}"

    async def _converse(self, socket: ClientConnection) -> None:
        await socket.send(encode(await self._hello()))
        async with asyncio.timeout(HANDSHAKE_S):
            welcome = decode_to_worker(await _binary(socket))
        if isinstance(welcome, Refuse):
            raise WorkerRefused(welcome.reason)
        if not isinstance(welcome, Welcome):
            raise ProtocolError(f"got {type(welcome).__name__}, expected a welcome")
        outbox = self._resume(welcome)
        self._socket = socket
        log.info("relay: connected to %s as %s", self._config.proxy, self._config.name)
        sender = asyncio.create_task(_send(socket, outbox))
        try:
            async for data in socket:
                self._receive(decode_to_worker(_bytes(data)))
        finally:
            sender.cancel()
            await asyncio.wait([sender])

    async def _hello(self) -> Hello:
        info = self._engine.info
        with contextlib.suppress(EngineError):  # its calls and checks will say so
            await self._weights.check(HANDSHAKE_S / 2)
        return Hello(
            protocol=PROTOCOL_VERSION,
            name=self._config.name,
            incarnation=self._incarnation,
            fingerprint=self._fingerprint,
            model=info.model,
            version=info.version,
            max_context_tokens=info.max_context_tokens,
            max_calls=self._config.max_calls,
            calls=tuple(self._calls),
            serves=self._weights.served,
        )

    def _resume(self, welcome: Welcome) -> asyncio.Queue[ToProxy]:
        self._tries = 0
        self._window, self._grace_s = welcome.window, welcome.grace_s
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        for number in set(self._calls) - set(welcome.resumed):
            self._end(number)
        self._outbox = outbox = asyncio.Queue[ToProxy]()
        for number, wanted in welcome.resumed.items():
            if number not in self._calls:  # it was abandoned during the handshake
                outbox.put_nowait(Frame(number, wanted, error="the worker has ended the call"))
                continue
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
                    self._post_waiting(call)
            case End():
                self._end(message.call)
            case AbortCall():
                if call := self._calls.get(message.call):
                    self._tasks.create_task(self._abort(call))
            case Check():
                self._tasks.create_task(self._check(message.number))
            case Describe():
                self._tasks.create_task(self._describe(message))
            case Weights():
                self._weights.want(message)
            case _:
                raise ProtocolError(f"got {type(message).__name__} after the handshake")

    def _begin(self, request: Generate) -> None:
        if request.call in self._calls:
            raise ProtocolError(f"call {request.call} was begun twice")
        call = self._calls[request.call] = _Call(request.call, request.request_id)
        self._idle.clear()
        if len(self._calls) > self._config.max_calls:
            self._post(
                call,
                Frame(
                    request.call,
                    0,
                    error=f"the worker is full: {self._config.max_calls} calls are in flight",
                ),
            )
        elif refusal := self._weights.refusal:
            self._post(call, Frame(request.call, 0, error=refusal))
        else:
            call.task = self._tasks.create_task(self._sample(call, request))

    async def _sample(self, call: _Call, request: Generate) -> None:
        """Forwards the engine's chunks to the proxy; those beyond the window wait."""
        finished = False

        def forward(chunk: Chunk) -> None:
            nonlocal finished
            finished = chunk.finish_reason is not None
            self._post(call, frame_of(call.number, call.frames, chunk))

        try:
            await self._engine.generate(
                unpack_ids(request.prompt),
                sampling_of(request.sampling),
                forward,
                request_id=request.request_id,
                cache_salt=request.cache_salt,
                stream=request.stream,
            )
            if not finished:
                raise EngineError("the engine ended its stream without a finish_reason")
        except (EngineError, RequestError) as error:
            refused, lacks = isinstance(error, RequestError), isinstance(error, MissingAdapter)
            if lacks:
                self._weights.doubt_adapter(request.sampling.get("adapter"), error.message)
            elif not refused:
                self._weights.doubt(error.message)
            failed = Frame(call.number, call.frames, error=error.message, refused=refused)
            failed.lacks_adapter = lacks
            self._post(call, failed)
        except Exception as error:  # such as an id that does not fit into a frame
            log.exception("relay: the call %s failed", request.request_id)
            words = f"{type(error).__name__}: {error}"
            self._post(call, Frame(call.number, call.frames, error=words))

    def _post(self, call: _Call, frame: Frame) -> None:
        call.frames += 1
        call.waiting.append(frame)
        self._post_waiting(call)

    def _post_waiting(self, call: _Call) -> None:
        """Posts the frames that wait, as far as the proxy has room for them."""
        while call.waiting and len(call.kept) < self._window:
            frame = call.waiting.popleft()
            call.kept.append(frame)
            if self._outbox is not None:
                self._outbox.put_nowait(frame)

    def _end(self, number: int) -> None:
        call = self._calls.pop(number, None)
        if call is not None and call.task is not None:
            call.task.cancel()
        if not self._calls:
            self._idle.set()

    async def _abort(self, call: _Call) -> None:
        try:
            await self._engine.abort(call.request_id)
        except EngineError as error:
            log.warning("relay: a call could not be aborted: %s", error.message)

    async def _check(self, number: int) -> None:
        try:
            await self._engine.check()
            error = await self._weights.check() or None
        except EngineError as failure:
            error = failure.message
            self._weights.doubt(error)
        if self._outbox is not None:
            self._outbox.put_nowait(Health(number, self._engine.info.version, error))

    async def _describe(self, question: Describe) -> None:
        held = await self._weights.held_dtypes(question.tensors)
        if self._outbox is not None:
            self._outbox.put_nowait(Described(question.number, held))

    def _report(self, message: Serves) -> None:
        if self._outbox is not None:
            self._outbox.put_nowait(message)

    async def _drain(self) -> None:
        if self._outbox is not None:
            self._outbox.put_nowait(Leave())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), self._config.drain_s)

    def _abandon(self) -> None:
        self._expiry = None
        if self._calls:
            log.warning(
                "relay: aborting %d calls that the proxy no longer waits for", len(self._calls)
            )
        for number in list(self._calls):
            self._end(number)


class _Call:
    """A call that the worker serves: its task, and the frames that are not acknowledged yet."""

    def __init__(self, number: int, request_id: str) -> None:
        self.number = number
        self.request_id = request_id
        self.task: asyncio.Task[None] | None = None
        self.frames = 0
        """Number of frames so far."""
        self.kept: deque[Frame] = deque()
        """Frames that were posted and are not acknowledged."""
        self.waiting: deque[Frame] = deque()
        """Frames that the proxy has no room for yet."""

    def taken(self, number: int) -> None:
        while self.kept and self.kept[0].number < number:
            self.kept.popleft()


async def _send(socket: ClientConnection, outbox: asyncio.Queue[ToProxy]) -> None:
    with contextlib.suppress(ConnectionClosed):
        while True:
            await socket.send(encode(await outbox.get()))


async def _binary(socket: ClientConnection) -> bytes:
    return _bytes(await socket.recv())


def _bytes(data: str | bytes) -> bytes:
    if isinstance(data, str):
        raise ProtocolError("got a text message, expected a binary one")
    return data
