"""A relay worker as an `Engine` whose calls survive a reconnect.

Invariant: the worker samples a call at most once, and the call's reader gets every frame exactly
once and in order, or an EngineError. While the worker is disconnected, its calls wait for the grace
time; they are cut when it expires, or when another process connects under the worker's name. Where
weights are published, a worker gets new calls only while it serves them, or, until a deadline,
those before them.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Protocol

import msgspec

from proxy.engines.protocol import EngineInfo, PreparedImage, Sampling, Take
from proxy.errors import EngineError, ProxyError, UnreachableEngine
from proxy.extras.relay.engine_call import RelayCall
from proxy.extras.relay.protocol import (
    AbortCall,
    Check,
    Describe,
    Described,
    End,
    Frame,
    Generate,
    Health,
    Hello,
    Leave,
    ProtocolError,
    Serves,
    Taken,
    ToProxy,
    ToWorker,
    Weights,
    Welcome,
    pack_ids,
    sampling_fields,
)
from proxy.records import Ids

Tensors = tuple[tuple[str, str, tuple[int, ...]], ...]
"""Name, trained type and shape of each."""

log = logging.getLogger(__name__)


class Connection(Protocol):
    """The hub's side of one WebSocket."""

    def post(self, message: ToWorker) -> None:
        """Queues `message`. It is discarded if the connection has ended."""
        ...

    def drop(self, reason: str) -> None: ...


class RelayEngine:
    """Implements `proxy.engines.protocol.Engine`."""

    def __init__(
        self,
        hello: Hello,
        *,
        window: int,
        grace_s: float,
        on_lost: Callable[[RelayEngine], None],
        on_weights: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_lost` is called once, when the worker is lost for good and its calls are cut;
        `on_weights` when it is known which weights the worker serves, or cannot serve."""
        self._on_lost = on_lost
        self._on_weights = on_weights
        self._wanted: Weights | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self.serves = _shared(hello.serves or Serves())
        """What the worker last said about its weights."""
        self._incarnation = hello.incarnation
        self._window = window
        self._grace_s = grace_s
        self._max_calls = hello.max_calls
        self._calls: dict[int, RelayCall] = {}
        self._numbers = count()
        self._checks: dict[int, asyncio.Future[Health | Described]] = {}
        self._connection: Connection | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._leaving = False
        self._lost = False
        self._info = EngineInfo(
            name=hello.name,
            url=f"relay://{hello.name}",
            healthy=False,
            version=hello.version,
            reports_version=True,
            model=hello.model,
            max_context_tokens=hello.max_context_tokens,
            adapters=True,
        )

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def connected(self) -> bool:
        return self._connection is not None

    def is_incarnation(self, hello: Hello) -> bool:
        return hello.incarnation == self._incarnation

    @property
    def has_wanted(self) -> bool:
        """Whether the worker serves the weights that are wanted."""
        wanted = self._wanted
        return wanted is None or (
            self.serves.publication == wanted.publication and self.serves.error is None
        )

    @property
    def settled(self) -> bool:
        """Whether it serves the weights that are wanted, or has failed to, or is too late."""
        return self.has_wanted or self.serves.error is not None or self._deadline is None

    def want(self, weights: Weights, patience_s: float) -> None:
        """Makes the worker serve these weights. Calls still go to one that serves those before
        them, for `patience_s` at most."""
        self._wanted = weights
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None
        if patience_s > 0:
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(patience_s, self._too_late)
        self.serves = msgspec.structs.replace(self.serves, error=None)
        self._info.healthy = self._info.healthy and self._may_sample
        self._post(weights)

    async def generate(
        self,
        prompt_ids: Ids,
        sampling: Sampling,
        take: Take,
        *,
        request_id: str,
        cache_salt: str | None = None,
        stream: bool = True,
    ) -> None:
        number = next(self._numbers)
        call = self._open(
            Generate(
                call=number,
                request_id=request_id,
                prompt=pack_ids(prompt_ids),
                sampling=sampling_fields(sampling),
                cache_salt=cache_salt,
                stream=stream,
            )
        )
        taken = 0
        try:
            while True:
                item = await call.items.get()
                if isinstance(item, ProxyError):
                    raise item
                take(item)
                if item.finish_reason is not None:
                    return
                taken += 1
                self._post(Taken(number, taken))
        finally:
            del self._calls[number]
            self._info.in_flight -= 1
            self._post(End(number))

    async def prepare(self, data: bytes, media_type: str) -> PreparedImage:
        """Workers prepare no images."""
        raise EngineError(f"worker {self._info.name!r} does not read images", status=502)

    async def abort(self, request_id: str) -> None:
        if self._connection is None:
            raise EngineError(f"worker {self._info.name!r} is not connected")
        for number, call in self._calls.items():
            if call.request.request_id == request_id:
                self._post(AbortCall(number))

    def forget(self, session_id: str) -> None:
        """Does nothing: the worker is not told that a session ends, and bounds what it keeps."""

    async def check(self) -> None:
        health = await self.probe()
        if self._connection is None:  # since the answer came
            raise EngineError(f"worker {self._info.name!r} lost its connection")
        self._info.version = health.version
        error = health.error or self._why_not
        self._info.healthy = error is None and not self._leaving
        if error is not None:
            raise EngineError(f"worker {self._info.name!r}: {error}")

    async def probe(self, timeout_s: float = 5.0) -> Health:
        """Asks the worker for its engine's health. Raises EngineError if it does not answer."""
        try:
            health = await self._ask(Check(next(self._numbers)), timeout_s)
        except TimeoutError as error:
            self._info.healthy = False
            raise EngineError(
                f"worker {self._info.name!r} did not answer within {timeout_s:g} s"
            ) from error
        if not isinstance(health, Health):
            raise EngineError(f"worker {self._info.name!r} answered another question")
        return health

    async def held_dtypes(
        self, tensors: Tensors, timeout_s: float
    ) -> tuple[str | None, ...] | None:
        """In which type the worker's engine holds each tensor; None: it cannot report that, or
        does not answer."""
        with suppress(EngineError, TimeoutError):
            answer = await self._ask(Describe(next(self._numbers), tensors), timeout_s)
            if isinstance(answer, Described) and len(answer.held or ()) == len(tensors):
                return answer.held
        return None

    async def close(self) -> None:
        self.lose("the proxy closed it")

    def attach(self, connection: Connection, hello: Hello) -> None:
        """Takes over the first or a later connection of this worker's process; calls continue."""
        if self._connection is not None:
            self._connection.drop("the worker has reconnected")
        if self._expiry is not None:
            self._expiry.cancel()
        open_calls = {n: call for n, call in self._calls.items() if not call.complete}
        resumed = {n: call.received for n, call in open_calls.items() if n in hello.calls}
        unheard = [call for n, call in open_calls.items() if n not in resumed]
        self._connection = connection
        served = hello.serves or Serves()
        if served.publication != self.serves.publication:
            self.serves = msgspec.structs.replace(_shared(served), error=self.serves.error)
        self._info.version = hello.version
        self._info.healthy = not self._leaving and self._may_sample
        self._post(Welcome(self._window, self._grace_s, resumed))
        for number, received in resumed.items():  # acknowledgements may have been lost
            self._post(Taken(number, received - self._calls[number].items.qsize()))
        if self._wanted is not None and not self.has_wanted:
            self._post(self._wanted)
        for call in unheard:
            if call.received:  # the worker's grace time began earlier, and has ended
                call.cut(f"worker {self._info.name!r} has abandoned the call")
            else:
                self._post(call.request)

    def detach(self, connection: Connection, *, gone: bool) -> None:
        """Handles the end of `connection`. `gone`: the worker closed it on purpose, so its calls
        are cut at once."""
        if self._connection is not connection:
            return
        self._connection, self._info.healthy = None, False
        while self._checks:
            _, waiting = self._checks.popitem()
            if not waiting.done():
                lost = EngineError(f"worker {self._info.name!r} lost its connection")
                waiting.set_exception(lost)
        if gone:
            self.lose("the worker left")
        else:
            late = f"the worker did not reconnect within {self._grace_s:g} s"
            self._expiry = asyncio.get_running_loop().call_later(self._grace_s, self.lose, late)

    def receive(self, message: ToProxy) -> None:
        """Raises ProtocolError when the worker breaks the protocol."""
        match message:
            case Frame():
                self._take(message)
            case Health() | Described():
                waiting = self._checks.pop(message.number, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)
            case Serves():
                self._hear(message)
            case Leave():
                self._leaving, self._info.healthy = True, False
            case Hello():
                raise ProtocolError("a second hello on one connection")

    def lose(self, reason: str, *, status: int = 503) -> None:
        """Cuts every call with an EngineError of `status`, and ends the engine."""
        if self._lost:
            return
        self._lost = True
        self._info.healthy = False
        for timer in (self._expiry, self._deadline):
            if timer is not None:
                timer.cancel()
        if self._connection is not None:
            self._connection.drop(reason)
            self._connection = None
        log.warning(
            "relay: lost worker %s (%s); %d calls were cut",
            self._info.name,
            reason,
            len(self._calls),
        )
        for call in self._calls.values():
            call.cut(f"worker {self._info.name!r}: {reason}; the call was cut", status)
        self._on_lost(self)

    @property
    def _why_not(self) -> str | None:
        """Why it gets no calls because of its weights."""
        if self._wanted is None or self._may_sample:
            return None
        error = self.serves.error or ("it is late" if self._deadline is None else "not yet")
        return f"it does not serve {self._wanted.publication} ({error})"

    @property
    def _may_sample(self) -> bool:
        served_before = self.serves.publication != "" and not self.settled
        return self.has_wanted or served_before

    def _too_late(self) -> None:
        self._deadline = None
        self._info.healthy = self._info.healthy and self._may_sample
        self._on_weights()

    def _hear(self, message: Serves) -> None:
        wanted = self._wanted
        if wanted is None or message.publication != wanted.publication:
            return  # others are wanted meanwhile
        if message.error is None:
            if not message.adapter:
                self._info.version = message.version
            self.serves = _shared(message)
        else:
            self.serves = msgspec.structs.replace(self.serves, error=message.error)
        self._info.healthy = self._may_sample and not self._leaving
        self._on_weights()

    async def _ask(self, question: Check | Describe, timeout_s: float) -> Health | Described:
        """Raises EngineError: the worker is not connected. TimeoutError: it does not answer."""
        if self._connection is None:
            raise EngineError(f"worker {self._info.name!r} is not connected")
        answer = self._checks[question.number] = asyncio.get_running_loop().create_future()
        self._post(question)
        try:
            return await asyncio.wait_for(answer, timeout_s)
        finally:
            self._checks.pop(question.number, None)

    def _open(self, request: Generate) -> RelayCall:
        name = self._info.name
        if self._lost or self._leaving:
            raise UnreachableEngine(f"worker {name!r} is gone")
        if len(self._calls) >= self._max_calls:
            raise EngineError(f"worker {name!r} is full: {self._max_calls} calls are in flight")
        call = self._calls[request.call] = RelayCall(request)
        self._info.in_flight += 1
        self._post(request)
        return call

    def _post(self, message: ToWorker) -> None:
        if self._connection is not None:
            self._connection.post(message)

    def _take(self, frame: Frame) -> None:
        call = self._calls.get(frame.call)
        if call is None or call.complete or frame.number < call.received:
            return
        if frame.number > call.received:
            raise ProtocolError(
                f"call {frame.call}: got frame {frame.number}, expected {call.received}"
            )
        if call.items.qsize() >= self._window:
            raise ProtocolError(f"call {frame.call}: more than {self._window} unread frames")
        call.put(frame)
        if frame.versions:
            self._info.version = frame.versions[-1][0]


def _shared(serves: Serves) -> Serves:
    """The same with one object per different type: there are as many as tensors."""
    held = serves.held and tuple(each and sys.intern(each) for each in serves.held)
    return msgspec.structs.replace(serves, held=held)
