"""A session that was recorded from a real vLLM is scored again by the same vLLM."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from proxy.app import build_app
from proxy.client import ProxyClient
from proxy.commands.replay import replay
from proxy.config import load_config
from proxy.engines.vllm_scoring import VllmScorer
from proxy.engines.vllm_server import VllmServer
from proxy.http_request import app_runner
from proxy.records import Turn
from tests.proxy.conftest import ADMIN_KEY

pytestmark = pytest.mark.engine
NOISE_NATS = 1e-3
"""The noise of float32 between prefill and decode; a wrong token differs by more than 1."""


@dataclass(frozen=True, slots=True)
class Running:
    control: ProxyClient
    http: aiohttp.ClientSession

    async def talk(self, sampling: dict[str, float], *, turns: int) -> list[Turn]:
        """The record of a conversation that was sampled with these parameters."""
        session = await self.control.create_session(sampling=sampling)
        messages = [{"role": "user", "content": "Say something."}]
        for _ in range(turns):
            body = {"messages": messages, "max_tokens": 24}
            headers = {"Authorization": f"Bearer {session.api_key}"}
            target = f"{session.base_url}/chat/completions"
            async with self.http.post(target, json=body, headers=headers) as response:
                reply = await response.json()
                assert response.status == 200, reply
            answer = {"role": "assistant", "content": reply["choices"][0]["message"]["content"]}
            messages += [answer, {"role": "user", "content": "Go on."}]
        return (await self.control.get_turns(session.trial_id))[1]


@pytest.fixture
async def running(vllm: VllmServer, tiny_model: Path, tmp_path: Path) -> AsyncIterator[Running]:
    config = load_config(
        model=tiny_model,
        engines=[{"url": vllm.url}],
        store=f"sqlite:///{tmp_path}/proxy.db",
        admin_key=ADMIN_KEY,
    )
    runner = app_runner(build_app(config), handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with ProxyClient(url, ADMIN_KEY) as control, aiohttp.ClientSession() as http:
        yield Running(control, http)
    await runner.cleanup()


@pytest.fixture
async def scorer(vllm: VllmServer) -> AsyncIterator[VllmScorer]:
    scorer = VllmScorer(vllm.url)
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
    turns = await running.talk({**sampling, "seed": 5}, turns=2)
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
    turns = await running.talk({"presence_penalty": 0.5}, turns=1)
    compared, (why,) = await replay(turns, scorer)
    assert (compared, "presence_penalty" in why) == ([], True)
