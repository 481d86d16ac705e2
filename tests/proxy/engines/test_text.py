"""Answers of a text-only server (`proxy.extras.engines.text`) are recorded and never trained."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import orjson
import pytest
from aiohttp import web

from proxy.records import SessionKind
from tests.proxy.conftest import RunningProxy, StartProxy

CHAT = "chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hi."}]}
PIECES = ("Hello", ", thank", " you.")


class TextServer:
    """Serves OpenAI's `/v1/completions` like a hosted provider."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.url = ""

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if not body["stream"]:
            choice = {"text": "".join(PIECES), "finish_reason": "stop"}
            return web.json_response({"choices": [choice]})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in PIECES:
            reason = "stop" if piece == PIECES[-1] else None
            event = {"choices": [{"text": piece, "finish_reason": reason}]}
            await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


@pytest.fixture
async def upstream() -> AsyncIterator[TextServer]:
    server, app = TextServer(), web.Application()
    app.router.add_post("/v1/completions", server.complete)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield server
    await runner.cleanup()


@pytest.fixture
async def proxy(start_proxy: StartProxy, upstream: TextServer) -> RunningProxy:
    """A proxy with a text-only engine and one that reports token ids."""
    proxy = await start_proxy()
    await proxy.control.add_engine(upstream.url, kind="text", name="text")
    return proxy


async def alone(proxy: RunningProxy) -> None:
    engines = await proxy.control.engines()
    assert {engine["name"]: engine["text_only"] for engine in engines}["text"]
    for engine in engines:
        if not engine["text_only"]:
            await proxy.control.remove_engine(engine["name"])


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_of_a_text_only_engine_are_recorded_without_log_probabilities(
    proxy: RunningProxy, upstream: TextServer, stream: bool
) -> None:
    await alone(proxy)
    session = await proxy.session(SessionKind.EVAL)
    if stream:
        await proxy.events(session, CHAT, {**BODY, "stream": True})
    else:
        status, reply = await proxy.post(session, CHAT, BODY)
        assert (status, reply["choices"][0]["message"]["content"]) == (200, "".join(PIECES))
    _, (turn,) = await proxy.record(session)
    decode = proxy.rendering.tokenizer.decode
    assert decode(turn.sampled_ids.tolist()) == "".join(PIECES)
    assert np.isnan(turn.logprobs).all()
    assert upstream.bodies[0]["prompt"] == decode(turn.prompt_ids.tolist())
    assert "<|im_end|>" in upstream.bodies[0]["stop"]


async def test_training_session_never_reaches_a_text_only_engine(
    proxy: RunningProxy, upstream: TextServer
) -> None:
    session = await proxy.session()
    assert (await proxy.post(session, CHAT, BODY))[0] == 200
    await alone(proxy)
    status, reply = await proxy.post(session, CHAT, {"messages": [*BODY["messages"]] * 2})
    assert (status, "kind eval" in reply["error"]["message"]) == (400, True)
    assert upstream.bodies == []


async def test_too_many_stop_strings_for_the_engine_are_refused(
    proxy: RunningProxy, upstream: TextServer
) -> None:
    await alone(proxy)
    session = await proxy.session(SessionKind.EVAL)
    status, reply = await proxy.post(session, CHAT, {**BODY, "stop": list("abcde")})
    assert (status, reply["error"]["param"]) == (400, "stop")
    assert upstream.bodies == []


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"top_k": 5}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"response_format": {"type": "json_object"}}, "structured"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 2}, "logprobs"),
    ],
)
async def test_parameter_that_the_engine_does_not_support_is_refused(
    proxy: RunningProxy, upstream: TextServer, asked: dict[str, Any], param: str
) -> None:
    await alone(proxy)
    session = await proxy.session(SessionKind.EVAL)
    status, reply = await proxy.post(session, CHAT, {**BODY, **asked})
    assert (status, reply["error"]["param"]) == (400, param)
    assert upstream.bodies == []


async def test_neutral_parameters_are_accepted(proxy: RunningProxy, upstream: TextServer) -> None:
    await alone(proxy)
    session = await proxy.session(SessionKind.EVAL)
    neutral = {"top_k": -1, "min_p": 0, "repetition_penalty": 1, "seed": 0}
    assert (await proxy.post(session, CHAT, {**BODY, **neutral}))[0] == 200
    assert upstream.bodies[0]["seed"] == 0
