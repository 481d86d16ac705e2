"""A session recorded from a real vLLM, scored again by it: rule 1, on real parts."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from proxy.app import build_app
from proxy.client import ProxyClient
from proxy.config import load_config
from proxy.engines.vllm import VllmEngine
from proxy.engines.vllm_server import VllmServer
from proxy.replay import replay

pytestmark = pytest.mark.engine
NOISE_NATS = 0.02
"""Of bfloat16 between a prefill and a decode; a wrong token or position is off by more than 1."""


async def test_a_replay_gives_the_recorded_log_probabilities(
    vllm: VllmServer, tiny_model: Path, tmp_path: Path
) -> None:
    config = load_config(
        model=tiny_model, engines=[{"url": vllm.url}], store=f"sqlite:///{tmp_path}/proxy.db"
    )
    runner = web.AppRunner(build_app(config), handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with ProxyClient(url) as control, aiohttp.ClientSession() as http:
            session = await control.create_session(sampling={"temperature": 1.0})
            messages = [{"role": "user", "content": "Say something."}]
            for _ in range(4):
                body = {"messages": messages, "max_tokens": 24}
                headers = {"Authorization": f"Bearer {session.api_key}"}
                target = f"{session.base_url}/chat/completions"
                async with http.post(target, json=body, headers=headers) as response:
                    reply = await response.json()
                    assert response.status == 200, reply
                answer = {"role": "assistant", "content": reply["choices"][0]["message"]["content"]}
                messages += [answer, {"role": "user", "content": "Go on."}]
            _, turns = await control.get_turns(session.trial_id)
    finally:
        await runner.cleanup()
    engine = VllmEngine(vllm.url)
    await engine.check()
    try:
        compared, skipped = await replay(turns, engine.score)
    finally:
        await engine.close()

    assert skipped == []
    assert [entry.turn for entry in compared] == [0, 1, 2, 3]
    assert sum(entry.tokens for entry in compared) == sum(len(t.sampled_ids) for t in turns) > 8
    assert max(entry.largest for entry in compared) <= NOISE_NATS
