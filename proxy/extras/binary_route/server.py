"""The server's side of the binary route (`frames.py`), for any source of tokens.

Invariant: a call ends with its connection, and one that is cancelled with its task, so that the
source can abort it. Each call has one end, after all of its tokens.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from proxy.engines.missing_logprob import MISSING_LOGPROB
from proxy.extras.binary_route.frames import (
    ID,
    LOGPROB,
    CallEnd,
    Sampled,
    StartCall,
    read_request,
    write,
)
from proxy.extras.binary_route.prompt_parts import ReceivedPrompts, UnknownPrefixError


class Logprob(Protocol):
    """An entry of `Output.logprobs`."""

    @property
    def logprob(self) -> float: ...


class Output(Protocol):
    """New tokens of a call, in the form of vLLM's `CompletionOutput`."""

    token_ids: Sequence[int]
    logprobs: Sequence[Mapping[int, Logprob] | None]
    """For each token those of the sampled one and of the most probable ones."""
    finish_reason: str | None
    """Set in the last output of a call."""
    stop_reason: int | str | None
    weight_versions: Any
    routed_experts: Any


class TokenSource(Protocol):
    """Samples answers."""

    def sample(self, body: dict[str, Any]) -> AsyncIterator[Output]:
        """The outputs for a body of `POST /inference/v1/generate`. A task that is cancelled aborts
        its call."""
        ...

    def error(self, failure: Exception) -> tuple[int, str]:
        """The HTTP status and the message for what `sample` has raised."""
        ...


class Socket(Protocol):
    """A WebSocket."""

    async def receive(self) -> bytes | None:
        """The next message; None after the last."""
        ...

    async def send(self, data: bytes) -> None: ...


class FramesConnection:
    """Answers the calls of one client."""

    def __init__(self, source: TokenSource, socket: Socket) -> None:
        self._source = source
        self._socket = socket
        self._running: dict[int, asyncio.Task[None]] = {}
        self._outbox = _Outbox()
        self._prompts = ReceivedPrompts()

    async def serve(self) -> None:
        """Returns when the client has disconnected. Raises msgspec.DecodeError for an invalid
        message."""
        sender = asyncio.create_task(self._send())
        try:
            while (data := await self._socket.receive()) is not None:
                request = read_request(data)
                if isinstance(request, StartCall):
                    self._start(request)
                elif (task := self._running.get(request.call)) is not None:
                    task.cancel()
        finally:
            tasks = [sender, *self._running.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def flush(self) -> None:
        """Sends what has been sampled."""
        if self._outbox.filled.is_set():
            await self._socket.send(write(self._outbox.take()))

    def _start(self, request: StartCall) -> None:
        call = request.call
        try:
            ids = self._prompts.whole(request.prefix, request.prompt)
        except UnknownPrefixError:
            self._outbox.end(CallEnd(call, unknown_prefix=True))
            return
        body = {**request.request, "token_ids": ids.tolist()}
        task = asyncio.create_task(self._answer(call, body))
        self._running[call] = task
        task.add_done_callback(lambda _: self._running.pop(call))

    async def _answer(self, call: int, body: dict[str, Any]) -> None:
        try:
            ranked = body["sampling_params"].get("logprobs") or 0
            async for output in self._source.sample(body):
                self._outbox.add(call, output, ranked)
        except Exception as failure:  # noqa: BLE001 - every error is the client's to know
            code, words = self._source.error(failure)
            self._outbox.end(CallEnd(call, error=words, code=code))

    async def _send(self) -> None:
        """Sends all that is sampled. All tasks that a step of the engine woke come before this
        one, so that their tokens are in one message. What is sampled during a send is in the
        next."""
        while True:
            await self._outbox.filled.wait()
            await self.flush()


class _Outbox:
    """What has been sampled and not been sent."""

    def __init__(self) -> None:
        self.filled = asyncio.Event()
        self._clear()

    def add(self, call: int, output: Output, ranked: int) -> None:
        """`ranked`: how many alternatives the call requests."""
        ids, known = output.token_ids, output.logprobs
        if ids:
            # Before anything is added, because it fails for an output that is not as expected.
            logprobs = [_sampled_logprob(token, k) for token, k in zip(ids, known, strict=True)]
            self._calls.append(call)
            self._counts.append(len(ids))
            self._ids += ids
            self._logprobs += logprobs
            if ranked:
                self._add_alternatives([list(k.items())[:ranked] if k else [] for k in known])
            self.filled.set()
        if output.finish_reason is not None:
            self.end(_end(call, output))

    def end(self, end: CallEnd) -> None:
        self._ends.append(end)
        self.filled.set()

    def take(self) -> Sampled:
        """What has been added since this was last called."""
        if self._alternative_counts:
            self._pad_alternatives(0)
        sampled = Sampled(
            calls=_packed(self._calls, ID),
            counts=_packed(self._counts, ID),
            ids=_packed(self._ids, ID),
            logprobs=_packed(self._logprobs, LOGPROB),
            alternative_counts=_packed(self._alternative_counts, ID),
            alternative_ids=_packed(self._alternative_ids, ID),
            alternative_logprobs=_packed(self._alternative_logprobs, LOGPROB),
            ends=self._ends,
        )
        self._clear()
        return sampled

    def _add_alternatives(self, tokens: list[list[tuple[int, Logprob]]]) -> None:
        self._pad_alternatives(len(tokens))
        for entries in tokens:
            self._alternative_counts.append(len(entries))
            self._alternative_ids += [token for token, _ in entries]
            self._alternative_logprobs += [_finite(entry.logprob) for _, entry in entries]

    def _pad_alternatives(self, tokens: int) -> None:
        """Adds 0 for the tokens before the last `tokens`, of calls that request none."""
        missing = len(self._ids) - tokens - len(self._alternative_counts)
        self._alternative_counts += [0] * missing

    def _clear(self) -> None:
        self._calls: list[int] = []
        self._counts: list[int] = []
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._alternative_counts: list[int] = []
        self._alternative_ids: list[int] = []
        self._alternative_logprobs: list[float] = []
        self._ends: list[CallEnd] = []
        self.filled.clear()


def _sampled_logprob(token: int, known: Mapping[int, Logprob] | None) -> float:
    entry = known.get(token) if known else None
    return MISSING_LOGPROB if entry is None else _finite(entry.logprob)


def _finite(logprob: float) -> float:
    """The value that vLLM's own routes send, also for NaN and minus infinity."""
    return max(MISSING_LOGPROB, logprob)  # not the other way round, which keeps NaN


def _packed(numbers: Sequence[float], dtype: np.dtype[Any]) -> bytes:
    return np.array(numbers, dtype).tobytes() if numbers else b""


def _end(call: int, output: Output) -> CallEnd:
    return CallEnd(
        call,
        finish=output.finish_reason,
        stop=output.stop_reason,
        versions=[(str(v.version), v.start, v.end) for v in output.weight_versions or ()],
        routed_experts=_npy(output.routed_experts),
    )


def _npy(array: Any) -> bytes | None:
    if array is None:
        return None
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()
