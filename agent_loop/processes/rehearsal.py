"""The first use of a model SDK, made once, before an agent's calls are forked.

An SDK builds type hints, validators and headers when it first needs them: the first call of
OpenAI's in a process takes six to eight times the processor time of the next one. Every trial is a
fork that makes a first call. So the server from which trials are forked makes one before them, by
each kind of client, whole and streamed, to a server on loopback that answers with constants.

Invariant: only the SDK's caches remain. The connections are closed, the threads have ended, and
nothing but loopback was connected to. A rehearsal that fails costs the trials their time and
nothing else.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from proxy.machine.port import family, http_url, loopback

TIMEOUT_S = 5.0
"""Seconds for one call; it takes 0.1."""
_TOOL_CALL = {
    "id": "call_0",
    "type": "function",
    "function": {"name": "rehearse", "arguments": "{}"},
}
_TOOL = {
    "type": "function",
    "function": {
        "name": "rehearse",
        "description": "",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}}},
    },
}
_MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "-"},
    {"role": "user", "content": "-"},
    {"role": "assistant", "content": None, "tool_calls": [_TOOL_CALL]},
    {"role": "tool", "tool_call_id": "call_0", "content": "-"},
]
_REQUEST: dict[str, Any] = {"model": "-", "messages": _MESSAGES, "tools": [_TOOL], "max_tokens": 1}
_HEAD = {"id": "chatcmpl-0", "created": 0, "model": "-"}
_USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
_MESSAGE = {"role": "assistant", "content": "-", "tool_calls": [_TOOL_CALL]}
_CHOICE = {"index": 0, "finish_reason": "tool_calls", "logprobs": None}
_WHOLE = {
    **_HEAD,
    "object": "chat.completion",
    "choices": [{**_CHOICE, "message": _MESSAGE}],
    "usage": _USAGE,
}
_DELTA = {**_MESSAGE, "tool_calls": [{**_TOOL_CALL, "index": 0}]}
_EVENT = {
    **_HEAD,
    "object": "chat.completion.chunk",
    "choices": [{**_CHOICE, "delta": _DELTA}],
    "usage": _USAGE,
}


def rehearse() -> None:
    """Uses OpenAI's SDK, which must be imported in this process already."""
    with _server() as base_url:
        for use in (_openai, _async_openai):
            _attempt(use, base_url)


def _attempt(use: Callable[[str], None], base_url: str) -> None:
    try:
        use(base_url)
    except Exception as error:  # noqa: BLE001 (the user's module may have replaced any part of it)
        sys.stderr.write(f"the SDK was not rehearsed: {type(error).__name__}: {error}\n")


def _openai(base_url: str) -> None:
    from openai import DefaultHttpxClient, OpenAI

    direct = DefaultHttpxClient(trust_env=False)  # not through a proxy of the environment
    with OpenAI(
        base_url=base_url, api_key="-", timeout=TIMEOUT_S, max_retries=0, http_client=direct
    ) as client:
        answer = client.chat.completions.create(**_REQUEST)
        answer.choices[0].message.to_dict()
        for _ in client.chat.completions.create(**_REQUEST, stream=True):
            pass


def _async_openai(base_url: str) -> None:
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    async def use() -> None:
        direct = DefaultAsyncHttpxClient(trust_env=False)
        async with AsyncOpenAI(
            base_url=base_url, api_key="-", timeout=TIMEOUT_S, max_retries=0, http_client=direct
        ) as client:
            await client.chat.completions.create(**_REQUEST)
            async for _ in await client.chat.completions.create(**_REQUEST, stream=True):
                pass

    asyncio.run(use())


@contextmanager
def _server() -> Iterator[str]:
    """The base URL of a server on loopback, which ends with the context."""
    host = loopback()
    _Server.address_family = family(host)
    with _Server((host, 0), _Answers) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        try:
            yield http_url(host, server.server_port) + "/v1"
        finally:
            server.shutdown()
            serving.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # so that closing it waits for them: they must not be there at a fork


class _Answers(BaseHTTPRequestHandler):
    """Answers each request with a constant."""

    protocol_version = "HTTP/1.1"
    timeout = TIMEOUT_S

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        kind, body = "application/json", json.dumps(_WHOLE)
        if asked.get("stream"):
            kind, body = "text/event-stream", f"data: {json.dumps(_EVENT)}\n\ndata: [DONE]\n\n"
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (its name there)
        """Writes nothing: the server's standard error is the trainer's."""
