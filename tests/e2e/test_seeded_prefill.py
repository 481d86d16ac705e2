"""Seeded requests that vLLM prefills in parts, and whose answer two calls sample."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
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

        async def sampled(
            seed: int, given: Sequence[int] = (), first_seed: int | None = None
        ) -> list[int]:
            sampling = Sampling(
                max_tokens=24 - len(given), temperature=1.0, seed=seed, first_seed=first_seed
            )
            prompt = np.array([*PROMPT, *given], np.int32)
            call = chunks_of(
                engine, prompt, sampling, request_id=f"r{seed}", cache_salt="s", stream=False
            )
            (chunk,) = [each async for each in call]
            return chunk.ids

        in_parts, at_once, other = await sampled(7), await sampled(7), await sampled(8)
        assert in_parts == at_once
        assert in_parts != other
        assert await sampled(3, in_parts[:9], first_seed=7) == in_parts[9:]
        together = await asyncio.gather(*(sampled(seed) for seed in (9, 7, 8, 10)))
        assert together[1:3] == [in_parts, other]
