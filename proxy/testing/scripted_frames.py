"""The binary route (`frames.py`) of the scripted engine.

Invariant: a call has the same tokens, log-probabilities, refusals and faults as by vLLM's route,
whose JSON the outputs are read from.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, cast

from aiohttp import WSMsgType, web

from proxy.extras.binary_route.server import FramesConnection, Output
from proxy.records import routed_experts

Answer = Callable[[dict[str, Any], "ScriptedSocket"], AsyncIterator[dict[str, Any]]]
"""The bodies of the events of a call, in vLLM's form. Raises ScriptedRefusal."""


class ScriptedSocket:
    """Implements `proxy.extras.binary_route.server.Socket` with aiohttp's."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._socket = web.WebSocketResponse(max_msg_size=16 * 2**20)

    async def serve(self, answer: Answer) -> web.StreamResponse:
        await self._socket.prepare(self._request)
        self._connection = FramesConnection(_Source(answer, self), self)
        await self._connection.serve()
        return self._socket

    async def receive(self) -> bytes | None:
        message = await self._socket.receive()
        return message.data if message.type is WSMsgType.BINARY else None

    async def break_off(self) -> None:
        """Sends after what has been sampled what is not a message."""
        await self._connection.flush()
        await self.send(b"{nonsense")

    async def send(self, data: bytes) -> None:
        await self._socket.send_bytes(data)

    async def cut(self) -> None:
        """Cuts the connection after what has been sampled, like an engine that dies."""
        await self._connection.flush()
        self.close()

    def close(self) -> None:
        """Closes the connection at once."""
        if self._request.transport is not None:
            self._request.transport.abort()


class _Source:
    """Implements `proxy.extras.binary_route.server.TokenSource`."""

    def __init__(self, answer: Answer, socket: ScriptedSocket) -> None:
        self._answer = answer
        self._socket = socket

    async def sample(self, body: dict[str, Any]) -> AsyncIterator[Output]:
        async for event in self._answer(body, self._socket):
            (choice,) = event["choices"]
            yield _output(choice)

    def error(self, failure: Exception) -> tuple[int, str]:
        return getattr(failure, "status", 500), str(failure)


def _output(choice: dict[str, Any]) -> Output:
    """What vLLM's engine returns where its route sends `choice`."""
    known = []
    for token in choice["logprobs"]["content"]:
        own, others = token["token_id"], token.get("top_logprobs", ())
        entries = {own: SimpleNamespace(logprob=token["logprob"])}
        for other in others:
            entries.setdefault(other["token_id"], SimpleNamespace(logprob=other["logprob"]))
        known.append(entries)
    experts = choice["routed_experts"]
    return cast(
        Output,
        SimpleNamespace(
            token_ids=choice["token_ids"],
            logprobs=known,
            finish_reason=choice["finish_reason"],
            stop_reason=choice["stop_reason"],
            weight_versions=[SimpleNamespace(**v) for v in choice["weight_versions"] or ()],
            routed_experts=routed_experts.load(b64decode(experts)) if experts else None,
        ),
    )
