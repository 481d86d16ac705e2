"""A fake vLLM that costs little CPU: every answer has the same tokens and log-probabilities.

It serves `/inference/v1/generate` and the binary route with `--tokens` tokens, streamed (one event
per token, at `--tokens-per-s`) or not, and `/v1/chat/completions` with 200 tokens, not streamed.
Below `/json` it has the same without the binary route. It prints its URL.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator

import orjson
import uvloop
from aiohttp import web

from benchmarks.proxy.fake_frames import FakeFrames
from proxy.extras.binary_route.frames import PATH as FRAMES

TOKENS = 200
_TOKEN = 75
"""An arbitrary id, because the text of the answer does not matter."""


def generate_choice(count: int, finish: str | None, tokens: int) -> dict[str, object]:
    token = {"token_id": _TOKEN, "logprob": -0.693147, "rank": 1}
    content = [{**token, "top_logprobs": [token]}] * count
    versions = [{"version": "1", "start": 0, "end": tokens}] if finish else None
    return {
        "index": 0,
        "token_ids": [_TOKEN] * count,
        "logprobs": {"content": content},
        "finish_reason": finish,
        "stop_reason": None,
        "routed_experts": None,
        "weight_versions": versions,
    }


def generate_body(tokens: int) -> bytes:
    choices = [generate_choice(tokens, "length", tokens)]
    return orjson.dumps({"request_id": "r", "model": "fake", "choices": choices})


def chat_body() -> bytes:
    token = {"token": " the", "logprob": -0.693147, "bytes": [32, 116, 104, 101]}
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": " the" * TOKENS},
        "logprobs": {"content": [{**token, "top_logprobs": []}] * TOKENS},
        "finish_reason": "length",
        "token_ids": [_TOKEN] * TOKENS,
    }
    usage = {"prompt_tokens": 250, "completion_tokens": TOKENS, "total_tokens": 250 + TOKENS}
    answer = {"id": "c", "object": "chat.completion", "created": 1, "model": "fake"}
    return orjson.dumps({**answer, "choices": [choice], "usage": usage})


def generate_events(tokens: int) -> Iterator[bytes]:
    for at in range(tokens):
        choice = generate_choice(1, "length" if at + 1 == tokens else None, tokens)
        yield b"data: " + orjson.dumps({"request_id": "r", "choices": [choice]}) + b"\n\n"
    yield b"data: [DONE]\n\n"


class _Stream:
    """Only writes the events to a connection, each at its time. With 1,000 streams, an engine that
    costs as much CPU as the proxy would leave the proxy none."""

    def __init__(
        self, transport: asyncio.Transport, events: list[bytes], per_s: float, in_steps: bool
    ) -> None:
        """`in_steps`: all streams get their tokens at the same time, as from a real engine."""
        self._transport = transport
        self._events = events
        self._per_s = per_s
        self._loop = asyncio.get_running_loop()
        self._begun = self._loop.time()
        if in_steps:
            self._begun -= self._begun % (1 / per_s)
        self._at = 0
        self.ended = self._loop.create_future()
        self._next()

    def _next(self) -> None:
        if self._transport.is_closing():
            self.ended.cancel()
            return
        self._transport.write(self._events[self._at])
        self._at += 1
        if self._at < len(self._events):
            self._loop.call_at(self._begun + self._at / self._per_s, self._next)
        else:
            self.ended.set_result(None)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def build_app(tokens: int, tokens_per_s: float, in_steps: bool) -> web.Application:
    whole, chat = generate_body(tokens), chat_body()
    events = [_chunk(event) for event in generate_events(tokens)]

    async def generate(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if b'"stream":true' not in body[-200:] and b'"stream":true' not in body[:200]:
            return web.Response(body=whole, content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        assert request.transport is not None
        await _Stream(request.transport, events, tokens_per_s, in_steps).ended
        return response

    async def complete(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=chat, content_type="application/json")

    async def frames(request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse(max_msg_size=64 * 2**20)
        await socket.prepare(request)
        await FakeFrames(socket, _TOKEN, tokens, tokens_per_s, in_steps).serve()
        return socket

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake", "max_model_len": 200_000}]})

    app = web.Application(client_max_size=64 * 2**20)
    app.router.add_get(FRAMES, frames)
    for root in ("", "/json"):
        app.router.add_post(f"{root}/inference/v1/generate", generate)
        app.router.add_post(f"{root}/v1/chat/completions", complete)
        app.router.add_get(f"{root}/v1/models", models)
        app.router.add_get(f"{root}/health", lambda _: _ok())
    return app


async def _ok() -> web.Response:
    return web.Response()


async def _serve(tokens: int, tokens_per_s: float, in_steps: bool) -> None:
    runner = web.AppRunner(build_app(tokens, tokens_per_s, in_steps), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.proxy.fake_vllm", description=__doc__
    )
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--tokens-per-s", type=float, default=30.0)
    parser.add_argument("--in-steps", action="store_true", help="tokens of all streams at one time")
    given = parser.parse_args()
    uvloop.run(_serve(given.tokens, given.tokens_per_s, given.in_steps))
