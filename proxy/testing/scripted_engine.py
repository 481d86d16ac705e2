"""An engine without a model: a server whose answers come from a script.

It implements vLLM's and SGLang's routes and the completions route. Use it in tests (`async with
ScriptedEngine(script) as engine`) and in benchmarks (`python -m proxy.testing.scripted_engine
--answer-tokens 200`). It keeps every call with its prompt and answer ids. `scripted_logprob`
depends only on the ids, so that a test can recompute it. With `expect_extension` the engine refuses
any prompt that does not extend a path of its session.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler

from proxy.engines import images, vllm, vllm_metrics
from proxy.machine.port import BACKLOG, family, http_url
from proxy.settings.late_section import load_extra
from proxy.testing.scripted_images import ScriptedImages
from proxy.testing.scripted_wires import (
    WIRES,
    Fault,
    ScriptedCall,
    ScriptedRefusal,
    Wire,
    scripted_logprob,
)

if TYPE_CHECKING:
    from proxy.testing.scripted_frames import ScriptedSocket

__all__ = ["Fault", "Script", "ScriptedCall", "ScriptedEngine", "scripted_logprob", "text_script"]

SGLANG_ABORT = "/abort_request"
FRAMES = "proxy.extras.binary_route.frames:PATH"
FRAMES_SOCKET = "proxy.testing.scripted_frames:ScriptedSocket"
"""The extra is imported by engines that have its route."""

Script = Callable[[list[int]], Sequence[int] | Awaitable[Sequence[int]]]
"""Prompt ids → answer ids, including the stop token. It may be a coroutine function."""


class ScriptedEngine:
    """See the module. To make the next call fail, add a `Fault` to `faults`."""

    def __init__(
        self,
        script: Script,
        *,
        model: str = "scripted",
        max_context_tokens: int = 131_072,
        token_delay_s: float = 0.0,
        expect_extension: bool = False,
        remember_calls: bool = True,
        cache_tokens: int | None = None,
        frames: bool = False,
        image_token: int | None = None,
    ) -> None:
        """`cache_tokens`: the size of the KV cache that its metrics report; None: no metrics.
        `frames`: it has the binary route of a vLLM server. `image_token`: the id for a part of an
        image, of an engine that prepares images (`scripted_images`)."""
        self.script = script
        self.model = model
        self.max_context_tokens = max_context_tokens
        self.token_delay_s = token_delay_s
        self.expect_extension = expect_extension
        self.remember_calls = remember_calls
        self.cache_tokens = cache_tokens
        self.frames = frames
        self.images = ScriptedImages(image_token)
        self.without_metrics = web.HTTPNotFound.status_code
        """Status of `/metrics` while `cache_tokens` is None."""
        self.load = ""
        """More lines of `/metrics`."""
        self.adapters: dict[str, Script] = {}
        """The scripts of LoRA adapters, by the name with `@` under which calls request them."""
        self.max_logprobs = 20
        """The largest number of alternatives that a call may request."""
        self.version = 0
        self.healthy = True
        self.answers_health = asyncio.Event()
        """Health requests are answered when it is set."""
        self.answers_health.set()
        self.calls: list[ScriptedCall] = []
        self.aborts: list[str] = []
        """Request ids that the abort route received."""
        self.called = asyncio.Event()
        """Set when a call has arrived."""
        self.checked = asyncio.Event()
        """Set when the engine's health has been requested."""
        self.violations: list[str] = []
        """With `expect_extension`: one message per refused prompt."""
        self.tokens_at_once = 1
        """Number of tokens that a stream's chunks have."""
        self.faults: list[Fault | None] = []
        """Those of the next calls; None for a call that succeeds."""
        self.url = ""
        self._sockets: set[ScriptedSocket] = set()
        self._running: dict[str, ScriptedCall] = {}
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._runner: web.AppRunner | None = None
        self._listening: socket.socket | None = None

    def build_app(self) -> web.Application:
        app = web.Application(client_max_size=64 * 2**20)
        app.add_routes(
            [
                *(web.post(wire.route, self._generating(wire)) for wire in WIRES),
                web.post(images.RENDER, self._render),
                web.post(vllm.ABORT, self._abort),
                web.post(SGLANG_ABORT, self._abort),
                *([web.get(load_extra(FRAMES), self._serve_frames)] if self.frames else ()),
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.get(vllm_metrics.METRICS, self._metrics),
                web.get("/weight_info", self._weight_info),
                web.get("/get_model_info", self._weight_info),
                web.post("/update_weight_version", self._update_version),
                web.post("/pause", self._pause),
                web.post("/resume", self._resume),
            ]
        )
        return app

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Starts to listen and returns the URL."""
        self._runner = web.AppRunner(
            self.build_app(), access_log=None, handler_cancellation=True, shutdown_timeout=0
        )
        await self._runner.setup()
        address = (host, port)
        self._listening = socket.create_server(address, family=family(host), backlog=BACKLOG)
        await web.SockSite(self._runner, self._listening).start()
        self.url = http_url(host, self._listening.getsockname()[1])
        return self.url

    async def die(self) -> None:
        """Stops listening and cuts every connection at once, in mid-answer too, like a process that
        is killed. Await `close` then, which frees the rest."""
        await self._stop_accepting()
        if self._runner is None or self._runner.server is None:
            return
        for site in self._runner.sites:
            await site.stop()
        for connection in self._runner.server.connections:
            connection.force_close()

    async def close(self) -> None:
        """Stops listening and cuts every connection, like an engine that crashes."""
        await self._stop_accepting()
        for each in self._sockets:
            each.close()
        if self._runner is not None:
            for call in self._running.values():
                call.abort.set()
            await self._runner.cleanup()
            self._runner = None

    async def _stop_accepting(self) -> None:
        """Takes no new connection, and waits until each that was taken belongs to the server:
        asyncio leaves open, for nobody to close, what it accepts in the turn of the loop in which
        its server closes (Python 3.11)."""
        if self._listening is None:
            return
        asyncio.get_running_loop().remove_reader(self._listening)
        self._listening = None
        for _ in ("its transport is made", "the server is told of it"):
            await asyncio.sleep(0)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        await self.close()

    def _generating(self, wire: Wire) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            call = wire.read(orjson.loads(await request.read()))
            call.fault = self.faults.pop(0) if self.faults else None
            try:
                with self._begun(call):
                    answer = self._stream if call.stream else self._whole
                    return await answer(request, call, wire)
            except ScriptedRefusal as refusal:
                error = {"message": str(refusal), "code": refusal.status}
                return web.json_response({"error": error}, status=refusal.status)

        return handle

    async def _serve_frames(self, request: web.Request) -> web.StreamResponse:
        client: ScriptedSocket = load_extra(FRAMES_SOCKET)(request)
        self._sockets.add(client)
        try:
            return await client.serve(self._sample_for_frames)
        finally:
            self._sockets.discard(client)

    async def _sample_for_frames(
        self, body: dict[str, Any], client: ScriptedSocket
    ) -> AsyncIterator[dict[str, Any]]:
        wire = WIRES[0]
        call = wire.read(body)
        call.fault = self.faults.pop(0) if self.faults else None
        try:
            with self._begun(call):
                sent = 0
                async for at in self._sample(call):
                    yield wire.write(call, sent, at)
                    sent = at
                if call.stream or not call.breaks:
                    yield wire.write(call, sent, len(call.answer_ids))
                if call.breaks and call.fault is not None:
                    await self._break_frames(call, call.fault, client)
        except asyncio.CancelledError:
            self.aborts.append(call.request_id)
            raise

    async def _break_frames(self, call: ScriptedCall, fault: Fault, client: ScriptedSocket) -> None:
        if fault.kind == "error":
            raise ScriptedRefusal(500, "scripted fault")
        if fault.kind == "die":
            await client.cut()
        elif fault.kind == "nonsense":
            await client.break_off()
        await call.abort.wait()

    @contextmanager
    def _begun(self, call: ScriptedCall) -> Iterator[None]:
        """Raises ScriptedRefusal if the call is not accepted."""
        if "@" in (call.model or "") and call.model not in self.adapters:
            raise ScriptedRefusal(404, f"The model `{call.model}` does not exist.")
        refusal = self._refusal(call)
        if refusal is not None:
            raise ScriptedRefusal(400, refusal)
        self.images.check(call)
        if self.remember_calls:
            self.calls.append(call)
        self._running[call.request_id] = call
        self.called.set()
        try:
            yield
        except asyncio.CancelledError:
            call.finish_reason = "abort"
            call.abort.set()
            raise
        finally:
            del self._running[call.request_id]

    def _refusal(self, call: ScriptedCall) -> str | None:
        """The message of a refusal, in vLLM's wording; None if the call is accepted."""
        if len(call.prompt_ids) >= self.max_context_tokens:
            return f"The prompt (length {len(call.prompt_ids)}) exceeds max_model_len"
        if (wanted := call.sampling.get("logprobs") or 0) > self.max_logprobs:
            return (
                f"Requested sample logprobs of {wanted}, which is greater than max allowed: "
                f"{self.max_logprobs}"
            )
        if not self.expect_extension:
            return None
        earlier = [c.path for c in self.calls if c.cache_salt == call.cache_salt]
        if not earlier or any(call.prompt_ids[: len(path)] == path for path in earlier):
            return None
        words = f"call {call.request_id} extends none of {len(earlier)} paths of its session"
        self.violations.append(words)
        return words

    async def _whole(
        self, request: web.Request, call: ScriptedCall, wire: Wire
    ) -> web.StreamResponse:
        async for _ in self._sample(call):
            pass
        if call.fault is not None:
            broken = await self._break(request, call, wire, call.fault)
            if broken is not None:
                return broken
        body = wire.write(call, 0, len(call.answer_ids))
        return web.Response(body=orjson.dumps(body), content_type="application/json")

    async def _stream(
        self, request: web.Request, call: ScriptedCall, wire: Wire
    ) -> web.StreamResponse:
        if call.fault is not None and call.fault.kind == "error" and not call.fault.after_tokens:
            return web.json_response({"error": {"message": "scripted fault"}}, status=500)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            await response.prepare(request)
            sent = 0
            async for at in self._sample(call):
                await response.write(_event(wire, call, sent, at))
                sent = at
            if not call.breaks:
                await response.write(_event(wire, call, sent, len(call.answer_ids)))
                await response.write(b"data: [DONE]\n\n")
            elif call.fault is not None:
                await self._break(request, call, wire, call.fault, response)
        except ConnectionResetError:  # the client has disconnected, which is an abort for vLLM, too
            call.finish_reason = call.finish_reason or "abort"
        return response

    async def _sample(self, call: ScriptedCall) -> Any:
        """Samples one token at a time; yields the number of tokens so far, except at the last."""
        await self._resumed.wait()
        script = self.adapters.get(call.model or "", self.script)
        sampled = script(call.prompt_ids)
        ids = await sampled if isinstance(sampled, Awaitable) else sampled
        answer, finish = _bounded(list(ids), call.sampling)
        if call.breaks:
            answer = answer[: call.fault.after_tokens] if call.fault else []
        elif call.fault is not None and call.fault.kind == "abort":
            answer, finish = answer[: call.fault.after_tokens], "abort"
        for at, token in enumerate(answer):
            await self._wait_for_token(call)
            if call.abort.is_set():
                call.finish_reason = "abort"
                return
            call.answer_ids.append(token)
            call.versions.append(self.version)
            call.began.set()
            if call.stream and at + 1 < len(answer) and (at + 1) % self.tokens_at_once == 0:
                yield at + 1
        call.finish_reason = None if call.breaks else finish

    async def _wait_for_token(self, call: ScriptedCall) -> None:
        if not self._resumed.is_set():
            await self._resumed.wait()
        if self.token_delay_s:
            with suppress(TimeoutError):
                await asyncio.wait_for(call.abort.wait(), self.token_delay_s)

    async def _break(
        self,
        request: web.Request,
        call: ScriptedCall,
        wire: Wire,
        fault: Fault,
        response: web.StreamResponse | None = None,
    ) -> web.StreamResponse | None:
        if response is not None and call.answer_ids:
            await response.write(_event(wire, call, len(call.answer_ids) - 1, len(call.answer_ids)))
        if fault.kind == "stall":
            await call.abort.wait()
        elif fault.kind == "die" and request.transport is not None:
            request.transport.abort()
        elif fault.kind == "error" and response is not None:
            await response.write(b'data: {"error": {"message": "scripted fault", "code": 500}}\n\n')
        elif fault.kind == "error":
            return web.json_response({"error": {"message": "scripted fault"}}, status=500)
        elif fault.kind == "nonsense" and response is not None:
            await response.write(b"data: {nonsense\n\n")
        elif fault.kind == "nonsense":
            return web.Response(text="{nonsense")
        return None

    async def _abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        for request_id in body.get("request_ids") or [body["rid"]]:
            self.aborts.append(request_id.removeprefix(vllm.REQUEST_PREFIX))
            call = self._running.get(self.aborts[-1])
            if call is not None:
                call.abort.set()
        return web.Response()

    async def _render(self, request: web.Request) -> web.Response:
        try:
            return web.json_response(self.images.rendered(await request.json()))
        except ScriptedRefusal as refusal:
            return web.json_response({"error": {"message": str(refusal)}}, status=refusal.status)

    async def _health(self, _: web.Request) -> web.Response:
        self.checked.set()
        await self.answers_health.wait()
        return web.Response(status=200 if self.healthy else 503)

    async def _metrics(self, _: web.Request) -> web.Response:
        if self.cache_tokens is None:
            return web.Response(status=self.without_metrics)
        config = f'block_size="1",num_gpu_blocks="{self.cache_tokens}"'
        return web.Response(text=f"vllm:cache_config_info{{{config}}} 1.0\n{self.load}")

    async def _models(self, _: web.Request) -> web.Response:
        model = {"id": self.model, "object": "model", "max_model_len": self.max_context_tokens}
        return web.json_response({"object": "list", "data": [model]})

    async def _weight_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": str(self.version)})

    async def _update_version(self, request: web.Request) -> web.Response:
        self.version = int((await request.json())["new_version"])
        return web.json_response({"success": True})

    async def _pause(self, _: web.Request) -> web.Response:
        self._resumed.clear()
        return web.json_response({"status": "paused"})

    async def _resume(self, _: web.Request) -> web.Response:
        self._resumed.set()
        return web.json_response({"status": "resumed"})


def text_script(
    answer: Callable[[str], str],
    *,
    decode: Callable[[list[int]], str],
    encode: Callable[[str], list[int]],
    end_ids: Sequence[int],
) -> Callable[[list[int]], list[int]]:
    """A script in terms of text: `answer` gets the decoded prompt, including special tokens."""
    return lambda prompt_ids: [*encode(answer(decode(prompt_ids))), *end_ids]


def _bounded(answer: list[int], sampling: dict[str, Any]) -> tuple[list[int], str]:
    stops = set(sampling.get("stop_token_ids") or ())
    end = next((at + 1 for at, token in enumerate(answer) if token in stops), len(answer))
    limit = int(sampling["max_tokens"])
    return (answer[:limit], "length") if end > limit else (answer[:end], "stop")


def _event(wire: Wire, call: ScriptedCall, start: int, end: int) -> bytes:
    return b"data: " + orjson.dumps(wire.write(call, start, end)) + b"\n\n"


async def _serve(arguments: argparse.Namespace) -> None:
    answer = [7] * (arguments.answer_tokens - 1) + [2]
    engine = ScriptedEngine(
        lambda _: answer, token_delay_s=arguments.token_delay_s, remember_calls=False
    )
    sys.stdout.write(f"{await engine.start(arguments.host, arguments.port)}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


def main() -> None:
    """Runs a scripted engine and prints its URL once it listens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--answer-tokens", type=int, default=200)
    parser.add_argument("--token-delay-s", type=float, default=0.0)
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
