"""Adds the binary route (`frames.py`) to a vLLM server, which loads this module by `--middleware`:

    vllm serve MODEL --enable-scale-out --middleware proxy.extras.binary_route.vllm.FramesRoute

Invariant: both routes accept and refuse the same requests, because vLLM's own handler of
`POST /inference/v1/generate` checks and starts them; only what the engine returns is sent in
another form. Without that handler, or with one that is not as expected, there is no route.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import import_module
from typing import Any

from proxy.extras.binary_route.frames import PATH
from proxy.extras.binary_route.server import FramesConnection, Output

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_RENDERERS = ("serve_tokens_stream_generator", "serve_tokens_full_generator")
"""The methods of vLLM's handler that make JSON of the engine's outputs."""


class FramesRoute:
    """ASGI middleware that adds the route when the server starts. It only adds it, so that every
    other middleware, such as those that check keys, comes before the route."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            route = import_module("starlette.routing").WebSocketRoute(PATH, _serve)
            scope["app"].router.routes.append(route)
        await self._app(scope, receive, send)


async def _serve(socket: Any) -> None:
    handler = socket.app.state.serving_tokens
    if not all(hasattr(handler, name) for name in _RENDERERS):
        await socket.close()
        return
    await socket.accept()
    await FramesConnection(_VllmSource(handler), _Socket(socket)).serve()


class _VllmSource:
    """Implements `proxy.extras.binary_route.server.TokenSource`."""

    def __init__(self, handler: Any) -> None:
        self._handler = copy.copy(handler)
        self._handler.serve_tokens_stream_generator = lambda request, outputs, *_: outputs
        self._handler.serve_tokens_full_generator = _outputs
        protocol = import_module("vllm.entrypoints.scale_out.token_in_token_out.protocol")
        self._read = protocol.GenerateRequest.model_validate

    async def sample(self, body: dict[str, Any]) -> AsyncIterator[Output]:
        request = self._read(body)
        results = await self._handler.serve_tokens(request)
        if (refusal := getattr(results, "error", None)) is not None:
            raise _CallError(refusal.code, refusal.message)
        async for result in results:
            (output,) = result.outputs
            if output.finish_reason == "error":
                raise _CallError(500, "the engine failed during this call")
            yield output

    def error(self, failure: Exception) -> tuple[int, str]:
        if isinstance(failure, _CallError):
            return failure.status, str(failure)
        error = self._handler.create_error_response(failure).error
        return error.code, error.message


class _CallError(Exception):
    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


async def _outputs(request: Any, outputs: Any, *_: Any) -> Any:
    return outputs


class _Socket:
    """Implements `proxy.extras.binary_route.server.Socket` with Starlette's."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket

    async def receive(self) -> bytes | None:
        message = await self._socket.receive()
        data: bytes | None = message.get("bytes")
        return data if message["type"] == "websocket.receive" else None

    async def send(self, data: bytes) -> None:
        await self._socket.send_bytes(data)
