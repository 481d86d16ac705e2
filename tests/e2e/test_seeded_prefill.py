"""Seeded requests whose prompt vLLM prefills in several parts."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest

from proxy.engines.protocol import Sampling
from proxy.engines.vllm import VllmEngine
from proxy.engines.vllm_server import VllmConfig, VllmServer
from tests.proxy.pushed import chunks_of

pytestmark = pytest.mark.engine
PART_TOKENS = 128
PROMPT = np.arange(20, 20 + 4 * PART_TOKENS - 12, dtype=np.int32) % 300 + 20
"""Four parts; with the cache of the first request, the last part alone is prefilled."""


async def test_seeded_answer_does_not_depend_on_the_parts_of_its_prefill(
    tiny_model: Path, tmp_path: Path
) -> None:
    args = ("--max-num-batched-tokens", str(PART_TOKENS))
    config = VllmConfig(max_sequences=4, nice=1, args=args)
    server = VllmServer(config, tiny_model, log=tmp_path / "vllm.log", dtype="float32")
    async with server, AsyncExitStack() as stack:
        engine = VllmEngine(server.url)
        stack.push_async_callback(engine.close)
        await engine.check()

        async def sampled(seed: int) -> list[int]:
            sampling = Sampling(max_tokens=24, temperature=1.0, seed=seed)
            call = chunks_of(
                engine, PROMPT, sampling, request_id=f"r{seed}", cache_salt="s", stream=False
            )
            (chunk,) = [each async for each in call]
            return chunk.ids

        in_parts, at_once, other = await sampled(7), await sampled(7), await sampled(8)
        assert in_parts == at_once
        assert in_parts != other
