"""A session that was recorded from a real vLLM is scored again by the same vLLM."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from proxy.commands.replay import replay
from proxy.engines.vllm_scoring import VllmScorer
from proxy.engines.vllm_server import VllmServer
from proxy.records import SessionKind
from tests.conftest import TINY_CONTEXT_TOKENS
from tests.e2e.running_proxy import Running, running_proxy

pytestmark = pytest.mark.engine
NOISE_NATS = 1e-3
"""The noise of float32 between prefill and decode; a wrong token differs by more than 1."""


class Nowhere:
    """The sessions have no images."""

    async def get_image(self, sha256: str) -> None:
        raise AssertionError(sha256)


@pytest.fixture
async def running(vllm: VllmServer, tiny_model: Path, tmp_path: Path) -> AsyncIterator[Running]:
    async with running_proxy(tiny_model, vllm.url, tmp_path) as running:
        yield running


@pytest.fixture
async def scorer(vllm: VllmServer) -> AsyncIterator[VllmScorer]:
    scorer = VllmScorer(vllm.url, source=Nowhere())
    yield scorer
    await scorer.close()


async def test_replay_returns_the_recorded_log_probabilities(
    running: Running, scorer: VllmScorer
) -> None:
    turns = await running.talk({"temperature": 1.0}, turns=4)
    compared, skipped = await replay(turns, scorer)

    assert skipped == []
    assert [entry.turn for entry in compared] == [0, 1, 2, 3]
    assert sum(entry.tokens for entry in compared) == sum(len(t.sampled_ids) for t in turns) > 8
    assert max(entry.largest for entry in compared) <= NOISE_NATS


async def test_path_that_fills_the_engines_context_is_scored(scorer: VllmScorer) -> None:
    path = np.arange(TINY_CONTEXT_TOKENS, dtype=np.int32) % 90 + 20
    scored, before = await scorer.path(path), await scorer.path(path[:-1])
    np.testing.assert_allclose(scored[:-1], before, atol=NOISE_NATS)
    assert scored[-1] < 0


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.6},
        {"temperature": 1.3, "top_p": 0.8},
        {"top_k": 20},
        {"temperature": 0.7, "min_p": 0.005},
        {"repetition_penalty": 4.0},
    ],
    ids=str,
)
async def test_other_sampling_parameters_are_used_for_scoring(
    running: Running, scorer: VllmScorer, sampling: dict[str, float]
) -> None:
    turns = await running.talk({**sampling, "seed": 5}, turns=2, kind=SessionKind.EVAL)
    compared, skipped = await replay(turns, scorer)
    assert skipped == []
    assert [entry.tokens for entry in compared] == [len(turn.sampled_ids) for turn in turns]
    assert max(entry.largest for entry in compared) <= NOISE_NATS

    plain = [replace(turn, sampling={}) for turn in turns]
    (entry, *_), _ = await replay(plain, scorer)
    assert entry.largest > 10 * NOISE_NATS


async def test_parameters_that_depend_on_the_whole_answer_are_not_scored(
    running: Running, scorer: VllmScorer
) -> None:
    turns = await running.talk({"presence_penalty": 0.5}, turns=1, kind=SessionKind.EVAL)
    compared, (why,) = await replay(turns, scorer)
    assert (compared, "presence_penalty" in why) == ([], True)
