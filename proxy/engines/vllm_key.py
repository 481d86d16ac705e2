"""The API key of a vLLM server that we started; vLLM loads this module by `--middleware`, and
`vllm_launch.py` puts the key into it.

vLLM's own key protects only the routes of agents. Its development routes, which pause the server
and change its weights, would be open to every process on the machine. Invariant: every route except
`/health` needs the key. Imports only the standard library.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

OPEN_PATHS = frozenset({"/health"})

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class RequireKey:
    """ASGI middleware: 401 for a request without `Authorization: Bearer KEY`."""

    key: ClassVar[str]
    """The key of this process's server. It is no argument, because vLLM creates the middleware."""

    def __init__(self, app: App) -> None:
        """Raises AttributeError if the process has no key."""
        self._app = app
        self._wanted = b"Bearer " + self.key.encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope.get("path") in OPEN_PATHS or self._knows(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            body = b'{"error": {"message": "missing or wrong API key", "code": 401}}'
            await send({"type": "http.response.body", "body": body})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _knows(self, scope: Message) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._wanted)
