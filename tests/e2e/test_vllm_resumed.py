"""Compares an answer of a real vLLM that breaks and continues with one that does not break."""

from __future__ import annotations

import numpy as np
import pytest

from proxy.engines.protocol import Chunk, Sampling, Take
from proxy.engines.vllm import VllmEngine
from proxy.engines.vllm_server import VllmServer
from proxy.errors import EngineError
from proxy.records import FinishReason, Ids
from proxy.routing.generation import Generation, Seam
from proxy.routing.router import Router
from tests.proxy.pushed import pieces_of

pytestmark = pytest.mark.engine
PROMPT = np.arange(20, 60, dtype=np.int32)
GREEDY = Sampling(max_tokens=32, temperature=0.0)


class BreakingEngine(VllmEngine):
    """An engine whose first calls break, each after a number of tokens in `breaks`."""

    breaks: list[int]

    async def generate(
        self,
        prompt_ids: Ids,
        sampling: Sampling,
        take: Take,
        *,
        request_id: str,
        cache_salt: str | None = None,
        stream: bool = True,
    ) -> None:
        left = self.breaks.pop(0) if self.breaks else sampling.max_tokens + 1

        def break_in_time(chunk: Chunk) -> None:
            nonlocal left
            if left < len(chunk.ids):
                if left:  # any number of tokens may arrive together
                    take(Chunk(chunk.ids[:left], chunk.logprobs[:left]))
                raise EngineError("the connection broke")
            left -= len(chunk.ids)
            take(chunk)

        await super().generate(
            prompt_ids,
            sampling,
            break_in_time,
            request_id=request_id,
            cache_salt=cache_salt,
            stream=stream,
        )


@pytest.mark.parametrize("breaks", [[0], [1], [9], [31], [5, 10, 4]], ids=str)
async def test_greedy_answer_that_breaks_is_that_of_an_undisturbed_call(
    vllm: VllmServer, breaks: list[int]
) -> None:
    engine = BreakingEngine(vllm.url)
    engine.breaks = [100, *breaks]
    await engine.check()
    router = Router([engine], check_interval_s=0.05)
    await router.start()
    ids: list[list[int]] = []
    logprobs: list[list[float]] = []
    for number in range(2):
        generation = Generation(router, PROMPT, GREEDY, request_id=f"s#{number}", session_id="s")
        pieces = [piece async for piece in pieces_of(generation)]
        chunks = [piece for piece in pieces if isinstance(piece, Chunk)]
        ids.append([token for chunk in chunks for token in chunk.ids])
        logprobs.append([value for chunk in chunks for value in chunk.logprobs])
        assert chunks[-1].finish_reason is FinishReason.LENGTH
        (span,) = generation.versions
        assert (span.start, span.end) == (0, 32)
    await router.close()
    assert ids[1] == ids[0]
    np.testing.assert_allclose(logprobs[1], logprobs[0], atol=1e-3)
    seams = sum(isinstance(piece, Seam) for piece in pieces)
    assert seams == len([tokens for tokens in breaks if tokens])
