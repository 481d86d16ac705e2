"""An engine from outside the package: three functions, and the renderer of the proxy's model."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from proxy.app import build_app
from proxy.client import ProxyClient
from proxy.config import load_config
from proxy.records import FinishReason
from proxy.rendering.tokenizer import load_tokenizer
from tests.proxy.checkpoint import write_checkpoint

KIND = "examples.own_parts.ollama_engine:make_engine"
HI = [{"role": "user", "content": "Hi."}]


@dataclass
class Ollama:
    """What Ollama's server answers, and what it was asked."""

    url: str = ""
    answer: dict[str, Any] = field(default_factory=dict)
    asked: list[dict[str, Any]] = field(default_factory=list)

    async def chat(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        message = {"role": "assistant", "content": "Hello from Ollama."}
        body = {"message": message, "done": True, "done_reason": "stop"}
        return web.json_response(body | self.answer)

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "qwen3:8b"}]})


@pytest.fixture
async def ollama() -> AsyncIterator[Ollama]:
    said, app = Ollama(), web.Application()
    app.router.add_post("/api/chat", said.chat)
    app.router.add_get("/api/version", said.models)
    app.router.add_get("/v1/models", said.models)
    async with TestServer(app) as server:
        said.url = str(server.make_url("")).rstrip("/")
        yield said


@asynccontextmanager
async def asking(ollama: Ollama, folder: Path) -> AsyncIterator[tuple[ProxyClient, Any, Path]]:
    """The control plane of a proxy with this engine, and a function that makes a call."""
    model = write_checkpoint(folder)
    engine = {"kind": KIND, "url": ollama.url, "model": "qwen3:8b"}
    store = f"sqlite:///{folder}/proxy.db"
    config = load_config(
        None,
        model=model,
        engines=[engine],
        store=store,
        admin_key="k",
        limits={"engine_patience_s": 0},
    )
    async with TestServer(build_app(config)) as server:
        url = str(server.make_url("")).rstrip("/")
        async with ProxyClient(url, "k") as control, aiohttp.ClientSession() as http:
            session = await control.create_session("t")

            async def ask(**body: Any) -> tuple[int, Any]:
                headers = {"Authorization": f"Bearer {session.api_key}"}
                target = f"{session.base_url}/chat/completions"
                sent = {"messages": HI, **body}
                async with http.post(target, json=sent, headers=headers) as response:
                    return response.status, await response.json()

            yield control, ask, model


async def test_answer_is_recorded_with_the_ids_of_the_proxys_own_model(
    ollama: Ollama, tmp_path: Path
) -> None:
    async with asking(ollama, tmp_path) as (control, ask, model):
        status, said = await ask(temperature=0.5, max_tokens=70, stop=["END"])
        assert (status, said["choices"][0]["message"]["content"]) == (200, "Hello from Ollama.")
        _, (turn,) = await control.get_turns("t")
    (asked,) = ollama.asked
    assert (asked["model"], asked["messages"]) == ("qwen3:8b", HI)
    assert asked["options"] == {
        "temperature": 0.5,
        "top_p": 1.0,
        "num_predict": 70,
        "stop": ["END"],
    }
    sampled = turn.sampled_ids.tolist()
    assert load_tokenizer(model).decode(sampled).endswith("Hello from Ollama.<|im_end|>")
    assert all(math.isnan(p) for p in turn.logprobs)
    assert turn.finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"done_reason": "load"}, "the unknown finish reason 'load'"),
        ({"error": "out of memory"}, "reported: out of memory"),
    ],
)
async def test_answer_that_cannot_be_used_is_a_failure_of_the_engine(
    ollama: Ollama, tmp_path: Path, answer: dict[str, Any], words: str, caplog: Any
) -> None:
    ollama.answer = answer
    async with asking(ollama, tmp_path) as (_, ask, _model):
        status, _ = await ask()
    assert status >= 500
    assert words in caplog.text
