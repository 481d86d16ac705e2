"""An engine with other words than the proxy's model is not used, and says why."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from proxy.engines.vllm import VllmEngine
from proxy.engines.vocabulary import KnownWords
from proxy.errors import EngineError
from proxy.rendering.tokenizer import load_tokenizer

EXAMPLES = Path(__file__).parents[3] / "examples"
MODEL, ANOTHER = EXAMPLES / "quickstart/model", EXAMPLES / "mini_swe_agent/model"


@asynccontextmanager
async def engine_that(answers: Callable[[dict[str, Any]], web.Response]) -> AsyncIterator[str]:
    """A vLLM that answers to /detokenize as given."""

    async def detokenize(request: web.Request) -> web.Response:
        return answers(await request.json())

    async def other(_request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "max_model_len": 64}]})

    app = web.Application()
    app.router.add_post("/detokenize", detokenize)
    app.router.add_get("/{path:.*}", other)
    async with TestServer(app) as server:
        yield str(server.make_url("/"))


def reading_with(folder: Path) -> Callable[[dict[str, Any]], web.Response]:
    tokenizer = load_tokenizer(folder)
    return lambda body: web.json_response({"prompt": " " + tokenizer.decode(body["tokens"])})


def silent(_body: dict[str, Any]) -> web.Response:
    return web.json_response({"error": "no tokenizer"}, status=501)


@pytest.mark.parametrize("answers", [reading_with(MODEL), silent], ids=["equal", "unknown"])
async def test_engine_with_the_same_words_or_without_a_tokenizer_is_used(answers: Any) -> None:
    words = KnownWords.of(load_tokenizer(MODEL))
    assert len(words.ids) > 30
    async with engine_that(answers) as url:
        engine = VllmEngine(url, words=words)
        await engine.check()
        assert engine.info.healthy
        await engine.close()


async def test_engine_with_other_words_is_refused_at_each_check_until_it_is_another() -> None:
    served = [reading_with(ANOTHER), reading_with(ANOTHER), reading_with(MODEL)]
    async with engine_that(lambda body: served.pop(0)(body)) as url:
        engine = VllmEngine(url, words=KnownWords.of(load_tokenizer(MODEL)))
        for _ in range(2):
            with pytest.raises(EngineError, match="another vocabulary than the proxy's"):
                await engine.check()
            assert not engine.info.healthy
        await engine.check()
        assert engine.info.healthy
        await engine.check()  # is not asked again
        await engine.close()
    assert served == []
