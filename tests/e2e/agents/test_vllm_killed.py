"""A real agent on a real vLLM that gets SIGKILL in the middle of an answer and is started again.

The answer is that of an undisturbed vLLM, token by token, because the model samples greedily.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from agent_loop.records import RolloutStatus
from agent_loop.trial_config import SamplingConfig
from proxy.client import ProxyClient
from proxy.engines.vllm_server import VllmConfig, VllmServer
from proxy.records import Turn, TurnStatus
from tests.attacks.server import family
from tests.e2e.agents.test_agents import AGENTS, ROOT, example, trial
from tests.e2e.test_proxy_killed import ADMIN_KEY, Proxy
from tests.needs import needs

pytestmark = [
    pytest.mark.agents,
    pytest.mark.engine,
    pytest.mark.long,
    needs(None if (AGENTS / ".ready").exists() else f"no {AGENTS}: make agents"),
]
CONTEXT_TOKENS = 32_768
"""Room for the agent's prompt in the checkpoint's small vocabulary."""
GREEDY = SamplingConfig(temperature=0.01, max_tokens=64)
"""As far as vLLM allows for a session of kind `train`."""
START_S = 900.0
"""On a busy machine. The proxy waits this time for its engine."""
EVENTS = 8
"""vLLM is killed when it has sent this number of events of an answer."""


class Tap:
    """Forwards all requests to a vLLM; the first answer that has EVENTS events kills it."""

    def __init__(self, server: VllmServer) -> None:
        self.server = server
        self.armed = False
        self.killed = asyncio.Event()

    async def forward(self, request: web.Request) -> web.StreamResponse:
        url = f"http://127.0.0.1:{self.server.port}{request.rel_url}"
        headers = {"Authorization": request.headers.get("Authorization", "")}
        body, response = await request.read(), web.StreamResponse()
        try:
            async with (
                aiohttp.ClientSession() as http,
                http.request(
                    request.method, url, data=body, json=None, headers=headers | JSON
                ) as answer,
            ):
                response = web.StreamResponse(status=answer.status)
                response.content_type = answer.content_type
                await response.prepare(request)
                events = 0
                async for line in answer.content:
                    await response.write(line)
                    events += line.startswith(b"data: {")
                    if self.armed and events == EVENTS:
                        self.armed = False
                        self._kill()
        except aiohttp.ClientError:  # vLLM is dead: so is this connection
            if request.transport is not None:
                request.transport.abort()
        return response

    def _kill(self) -> None:
        assert self.server._process is not None
        for pid in reversed(family(self.server._process.pid)):
            os.kill(pid, signal.SIGKILL)
        self.killed.set()


JSON = {"Content-Type": "application/json"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The quickstart's checkpoint with a longer context."""
    folder = tmp_path / "model"
    shutil.copytree(ROOT / "examples/quickstart/model", folder)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = CONTEXT_TOKENS
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
async def tap(model: Path, tmp_path: Path) -> AsyncIterator[Tap]:
    settings = VllmConfig(max_context_tokens=CONTEXT_TOKENS, start_timeout_s=START_S)
    server = VllmServer(settings, model, log=tmp_path / "vllm.log", dtype="float32")
    await server.start()
    try:
        yield Tap(server)
    finally:
        await server.stop()


async def test_answer_of_a_killed_vllm_is_continued_by_the_next_one(
    tap: Tap, model: Path, tmp_path: Path, unused_tcp_port: int
) -> None:
    app = web.Application(client_max_size=2**26)
    app.router.add_route("*", "/{path:.*}", tap.forward)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    key = urlsplit(tap.server.url).netloc.rpartition("@")[0]
    address = f"{key}@127.0.0.1:{runner.addresses[0][1]}"
    url = urlunsplit(("http", address, "", "", ""))
    patient = {"engine_patience_s": START_S, "call_timeout_s": START_S}
    proxy = Proxy(tmp_path, model, url, unused_tcp_port, limits=patient)
    await proxy.start()
    try:
        async with ProxyClient(proxy.url, ADMIN_KEY) as control:
            expected = await _answers(control, tmp_path / "undisturbed")
            tap.armed = True
            playing = asyncio.create_task(_answers(control, tmp_path / "killed"))
            killed = asyncio.create_task(tap.killed.wait())
            await asyncio.wait([playing, killed], return_when=asyncio.FIRST_COMPLETED)
            assert tap.killed.is_set()
            await tap.server.start()
            found = await playing
    finally:
        await proxy.stop()
        await runner.cleanup()
    assert [turn.status for turn in found] == [TurnStatus.DONE] * len(expected)
    for turn, undisturbed in zip(found, expected, strict=True):
        np.testing.assert_array_equal(turn.sampled_ids, undisturbed.sampled_ids)
        np.testing.assert_allclose(turn.logprobs, undisturbed.logprobs, atol=0.1)


async def _answers(control: ProxyClient, folder: Path) -> list[Turn]:
    """The turns of pi in a trial of its own: it takes an answer of 64 tokens as it is."""
    rollout = await trial(
        control,
        example("pi"),
        folder,
        "Say it.",
        sampling=GREEDY,
        timeout_s=2 * START_S,
        check=["true"],
    )
    log = (Path(rollout.logs or os.devnull) / "agent.log").read_text(errors="replace")[-3000:]
    assert rollout.status is RolloutStatus.DONE, f"{rollout.error}\n{log}"
    _, turns = await control.get_turns(rollout.trial_id)
    assert turns, log
    return turns
