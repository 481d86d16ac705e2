"""Accepts relay workers on one WebSocket route and adds each of them as an engine.

Invariant: a worker becomes an engine only if it has the token, speaks this version of the protocol,
has the proxy's model, and uses a name that no connected worker has. A name belongs to one worker
process at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
from collections.abc import Awaitable, Callable

from aiohttp import WebSocketError, WSCloseCode, WSMsgType, web

from proxy.errors import ConfigurationError, EngineError, RequestError
from proxy.extras.relay.engine import RelayEngine, Tensors
from proxy.extras.relay.protocol import (
    FRAME_BYTES,
    PROTOCOL_VERSION,
    Fingerprint,
    Hello,
    ProtocolError,
    Refuse,
    ToWorker,
    Weights,
    decode_to_proxy,
    encode,
)
from proxy.extras.relay.section import RelayConfig

log = logging.getLogger(__name__)

MAX_WORKERS = 4096
"""Workers that may be connected; further ones get 503."""
HANDSHAKE_S = 10.0


class RelayHub:
    """Example:
    hub = RelayHub(config.relay, fingerprint(model), joined=router.add, left=router.remove)
    app.router.add_get(PATH, hub.connect)
    """

    def __init__(
        self,
        config: RelayConfig,
        fingerprint: Fingerprint,
        *,
        joined: Callable[[RelayEngine], Awaitable[None]],
        left: Callable[[str], Awaitable[None]],
    ) -> None:
        """`joined` gets each new engine and may refuse it with RequestError, at once. `left` gets
        the name of an engine that is lost for good, before another engine can have the name.

        Raises:
            ConfigurationError: no token is set.
        """
        if config.token is None:
            raise ConfigurationError("relay.token is not set; the relay needs a token")
        self._token = _hash(config.token.get_secret_value())
        self._config = config
        self._fingerprint = fingerprint
        self._joined = joined
        self._left = left
        self._engines: dict[str, RelayEngine] = {}
        self._farewells: set[asyncio.Task[None]] = set()
        self._open_sockets = 0
        self._weights: Weights | None = None
        self._patient_until = 0.0  # by the event loop's clock
        self._news = asyncio.Event()
        """Set, and replaced, when a worker joins, leaves, or says something about its weights."""

    @property
    def weights(self) -> Weights | None:
        """The published weights that every worker is to serve; None: its own."""
        return self._weights

    @property
    def engines(self) -> list[RelayEngine]:
        """The workers, connected or within their grace time."""
        return list(self._engines.values())

    def want(self, weights: Weights, patience_s: float) -> None:
        """Makes every worker, also one that joins later, serve these weights. `patience_s`: how
        long those that serve the weights before them still get calls."""
        self._weights = weights
        self._patient_until = asyncio.get_running_loop().time() + patience_s
        for engine in self.engines:
            engine.want(weights, patience_s)
        self._tell()

    async def held_dtypes(
        self, tensors: Tensors, timeout_s: float
    ) -> set[tuple[str | None, ...] | None]:
        """What the workers report of the types in which their engines hold these tensors."""
        asked = (engine.held_dtypes(tensors, timeout_s) for engine in self.engines)
        return set(await asyncio.gather(*asked))

    @property
    def settled(self) -> bool:
        """Whether each worker serves the wanted weights or has failed to, and there is one."""
        return bool(self._engines) and all(engine.settled for engine in self.engines)

    async def until_settled(
        self, until: float, publication: str | None = None, *, needs_worker: bool = False
    ) -> None:
        """Returns when each worker serves the wanted weights or has failed to, or at `until` by
        the event loop's clock. `publication`: when these are the wanted ones. With `needs_worker`,
        when there also is a worker."""

        def reached() -> bool:
            wanted = self._weights.publication if self._weights else ""
            none = not self._engines and not needs_worker
            return none or (self.settled and publication in (None, wanted))

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                while not reached():
                    await self._news.wait()

    async def until_replaced(self, weights: Weights | None) -> None:
        """Returns when others than these are the wanted ones."""
        while self._weights == weights:
            await self._news.wait()

    async def close(self) -> None:
        for engine in list(self._engines.values()):
            engine.lose("the proxy is stopping")
        await self._say_farewell()

    async def connect(self, request: web.Request) -> web.StreamResponse:
        """Handles one worker's connection from the handshake to its end."""
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme != "Bearer" or not hmac.compare_digest(_hash(token), self._token):
            log.warning("relay: a worker at %s sent a wrong token", request.remote)
            return web.json_response({"error": "wrong relay token"}, status=401)
        if self._open_sockets >= MAX_WORKERS:
            return web.json_response(
                {
                    "error": f"the proxy has the maximum of {MAX_WORKERS} workers; connect this "
                    "one to another proxy"
                },
                status=503,
                headers={"Retry-After": "10"},
            )
        socket = web.WebSocketResponse(
            heartbeat=self._config.silence_s * 2 / 3, max_msg_size=FRAME_BYTES, compress=False
        )
        await socket.prepare(request)
        self._open_sockets += 1
        try:
            await self._converse(socket)
        finally:
            self._open_sockets -= 1
        return socket

    async def _converse(self, socket: web.WebSocketResponse) -> None:
        try:
            hello = await _hello(socket)
            engine = await self._admit(hello)
        except TimeoutError:
            log.warning("relay: a worker sent no hello within %g s", HANDSHAKE_S)
            await socket.close(code=WSCloseCode.TRY_AGAIN_LATER)  # it is slow, or its network is
            return
        except (ProtocolError, _RefusedError) as error:
            log.warning("relay: a worker was refused: %s", error)
            await socket.send_bytes(encode(Refuse(str(error))))
            await socket.close(code=WSCloseCode.POLICY_VIOLATION)
            return
        connection = _Connection(socket)
        engine.attach(connection, hello)
        log.info("relay: worker %s is connected", hello.name)
        sender = asyncio.create_task(connection.send())
        gone = False
        try:
            gone = await self._read(socket, engine)
        finally:
            engine.detach(connection, gone=gone)
            sender.cancel()
            await asyncio.wait([sender])

    async def _read(self, socket: web.WebSocketResponse, engine: RelayEngine) -> bool:
        """Reads until the connection ends; returns whether the worker closed it on purpose."""
        try:
            async for message in socket:
                if message.type is WSMsgType.TEXT:
                    raise ProtocolError("got a text message, expected a binary one")
                if message.type is WSMsgType.ERROR:
                    if isinstance(message.data, WebSocketError):
                        raise ProtocolError(f"{message.data}")
                    break
                engine.receive(decode_to_proxy(message.data))
        except ProtocolError as error:
            engine.lose(f"it broke the protocol: {error}", status=502)
            await socket.close(code=WSCloseCode.PROTOCOL_ERROR)
        return socket.close_code == WSCloseCode.OK

    async def _admit(self, hello: Hello) -> RelayEngine:
        self._match(hello)
        await self._say_farewell()
        while (held := self._engines.get(hello.name)) is not None:
            if held.is_incarnation(hello):
                return held
            await self._evict(held)
            await self._say_farewell()
        # Nothing waits from here until `attach`: another process would evict an engine without a
        # connection.
        engine = RelayEngine(
            hello,
            window=self._config.window,
            grace_s=self._config.grace_s,
            on_lost=self._forget,
            on_weights=self._tell,
        )
        if self._weights is not None:
            now = asyncio.get_running_loop().time()
            engine.want(self._weights, max(0.0, self._patient_until - now))
        self._engines[hello.name] = engine
        try:
            await self._joined(engine)
        except RequestError as error:
            del self._engines[hello.name]
            raise _RefusedError(error.message) from error
        self._tell()
        return engine

    def _forget(self, engine: RelayEngine) -> None:
        if self._engines.pop(engine.info.name, None) is not None:
            self._tell()
            farewell = asyncio.ensure_future(self._part(engine.info.name))
            self._farewells.add(farewell)
            farewell.add_done_callback(self._farewells.discard)

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _part(self, name: str) -> None:
        with contextlib.suppress(RequestError):  # it was removed through the control plane
            await self._left(name)

    async def _say_farewell(self) -> None:
        while self._farewells:
            await asyncio.gather(*self._farewells)

    def _match(self, hello: Hello) -> None:
        if hello.protocol != PROTOCOL_VERSION:
            raise _RefusedError(
                f"worker {hello.name!r} speaks relay protocol {hello.protocol}, and this proxy "
                f"{PROTOCOL_VERSION}; run the same release on both sides"
            )
        ours, theirs = self._fingerprint, hello.fingerprint
        for what in ("tokenizer", "architecture"):
            if getattr(ours, what) != getattr(theirs, what):
                raise _RefusedError(
                    f"worker {hello.name!r} has another model than the proxy: its {what} is "
                    f"{getattr(theirs, what)[:12]}, the proxy's is {getattr(ours, what)[:12]} "
                    "(SHA-256); give the worker the proxy's model as --model"
                )

    async def _evict(self, held: RelayEngine) -> None:
        """Frees the name of a dead worker. Raises _RefusedError if the worker is alive."""
        name = held.info.name
        with contextlib.suppress(EngineError):
            await held.probe()
            raise _RefusedError(
                f"a worker named {name!r} is connected; give each worker its own --name"
            )
        held.lose("another process took over its name")


class _Connection:
    """Sends messages over one WebSocket in order. The calls in flight bound the queue's length."""

    def __init__(self, socket: web.WebSocketResponse) -> None:
        self._socket = socket
        self._outbox: asyncio.Queue[ToWorker | None] = asyncio.Queue()

    def post(self, message: ToWorker) -> None:
        self._outbox.put_nowait(message)

    def drop(self, reason: str) -> None:
        log.info("relay: dropping a connection: %s", reason)
        self._outbox.put_nowait(None)

    async def send(self) -> None:
        """Sends until the connection ends or is dropped."""
        with contextlib.suppress(ConnectionError):
            while (message := await self._outbox.get()) is not None:
                await self._socket.send_bytes(encode(message))
        await self._socket.close(code=WSCloseCode.GOING_AWAY)


async def _hello(socket: web.WebSocketResponse) -> Hello:
    """Raises TimeoutError, and ProtocolError if it gets something else."""
    message = await socket.receive(HANDSHAKE_S)
    if message.type is not WSMsgType.BINARY:
        raise ProtocolError(f"got a {message.type.name} message, expected a hello")
    hello = decode_to_proxy(message.data)
    if not isinstance(hello, Hello):
        raise ProtocolError(f"got {type(hello).__name__}, expected a hello")
    return hello


class _RefusedError(Exception):
    """The worker is refused; another attempt would be refused too."""


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()
