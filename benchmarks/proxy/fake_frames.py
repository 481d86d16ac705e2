"""The binary route of the fake vLLM (`binary_route/frames.py`), which costs little CPU."""

from __future__ import annotations

import asyncio
from collections import deque

import numpy as np
from aiohttp import WSMsgType, web

from proxy.extras.binary_route.frames import (
    ID,
    LOGPROB,
    CallEnd,
    Sampled,
    StartCall,
    read_request,
    write,
)

TICKS_PER_STEP = 32
"""Streams that have their own times send at one of these times of a step."""


class FakeFrames:
    """One connection. All streams get one token per step."""

    def __init__(
        self, socket: web.WebSocketResponse, token: int, tokens: int, per_s: float, in_steps: bool
    ) -> None:
        """`in_steps`: all streams get their tokens at the same time, as from a real engine."""
        self._socket = socket
        self._ids = np.full(tokens, token, ID).tobytes()
        self._logprobs = np.full(tokens, -0.693147, LOGPROB).tobytes()
        self._tokens = tokens
        self._tick_s = 1 / per_s / TICKS_PER_STEP
        self._phases: deque[dict[int, int]] = deque({} for _ in range(TICKS_PER_STEP))
        """Call → its tokens so far, by the ticks until their next token."""
        self._in_steps = in_steps
        self._whole: list[int] = []

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        begun, ticks = loop.time(), 0
        timer = loop.call_later(self._tick_s, lambda: None)

        def tick() -> None:
            nonlocal timer, ticks
            ticks += 1
            timer = loop.call_at(begun + ticks * self._tick_s, tick)
            self._step(self._phases[0])
            self._phases.rotate(-1)

        tick()
        try:
            async for message in self._socket:
                if message.type is not WSMsgType.BINARY:
                    break
                request = read_request(message.data)
                if isinstance(request, StartCall) and request.request.get("stream"):
                    at = (-ticks % TICKS_PER_STEP) if self._in_steps else -1
                    self._phases[at][request.call] = 0
                elif isinstance(request, StartCall):
                    if not self._whole:
                        loop.call_soon(self._answer)
                    self._whole.append(request.call)
                else:
                    for phase in self._phases:
                        phase.pop(request.call, None)
        finally:
            timer.cancel()

    def _answer(self) -> None:
        calls, self._whole = self._whole, []
        self._send(calls, self._tokens, [_end(call, self._tokens) for call in calls])

    def _step(self, running: dict[int, int]) -> None:
        if not running:
            return
        calls = list(running)
        for call in calls:
            running[call] += 1
        ended = [call for call in calls if running[call] == self._tokens]
        for call in ended:
            del running[call]
        self._send(calls, 1, [_end(call, self._tokens) for call in ended])

    def _send(self, calls: list[int], each: int, ends: list[CallEnd]) -> None:
        total = len(calls) * each
        ids = self._ids * len(calls) if each > 1 else self._ids[: ID.itemsize] * total
        values = self._logprobs[: LOGPROB.itemsize] * total
        counts = np.full(len(calls), each, ID).tobytes()
        sampled = Sampled(np.array(calls, ID).tobytes(), counts, ids, values, ends=ends)
        self._sending = asyncio.ensure_future(self._socket.send_bytes(write(sampled)))


def _end(call: int, tokens: int) -> CallEnd:
    return CallEnd(call, finish="length", versions=[("1", 0, tokens)])
