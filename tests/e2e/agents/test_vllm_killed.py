"""A real agent on a real vLLM that gets SIGKILL in the middle of an answer and is started again.

The second vLLM continues the prompt and the tokens that the first one has sent, and the record has
the tokens of both.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import aiohttp
import pytest
from aiohttp import web

from agent_loop.records import RolloutStatus
from agent_loop.trial.config import SamplingConfig
from proxy.client import ProxyClient
from proxy.engines.vllm import GENERATE
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
LONG = SamplingConfig(temperature=0.01, max_tokens=64)
"""The quickstart's model then uses all 64 tokens for this prompt, which it was not trained for."""
START_S = 900.0
"""On a busy machine. The proxy waits this time for its engine."""
EVENTS = 2
"""vLLM is killed when it has sent this number of events of an answer."""


@dataclass(slots=True)
class Generation:
    """A request that vLLM got, and what it sent."""

    prompt: list[int]
    sent: list[int] = field(default_factory=list)


class Tap:
    """Forwards all requests to a vLLM; the first answer that has EVENTS events kills it."""

    def __init__(self, server: VllmServer) -> None:
        self.server = server
        self.generations: list[Generation] = []
        self.killed = asyncio.Event()

    async def forward(self, request: web.Request) -> web.StreamResponse:
        url = f"http://127.0.0.1:{self.server.port}{request.rel_url}"
        headers = {
            "Authorization": request.headers.get("Authorization", ""),
            "Content-Type": "application/json",
        }
        body, response = await request.read(), web.StreamResponse()
        try:
            async with (
                aiohttp.ClientSession() as http,
                http.request(request.method, url, data=body, headers=headers) as answer,
            ):
                response = web.StreamResponse(status=answer.status)
                response.content_type = answer.content_type
                await response.prepare(request)
                if request.path == GENERATE:
                    await self._generate(json.loads(body)["token_ids"], answer, response)
                else:
                    await response.write(await answer.read())
        except aiohttp.ClientError:  # vLLM is dead: this connection ends, too
            if request.transport is not None:
                request.transport.close()
        return response

    async def _generate(
        self, prompt: list[int], answer: aiohttp.ClientResponse, response: web.StreamResponse
    ) -> None:
        generation, events, data = Generation(prompt), 0, b""
        self.generations.append(generation)
        async for line in answer.content:
            await response.write(line)
            if line.startswith(b"data: {"):
                data = line[6:]
            elif data and not line.strip():  # the event ends
                (choice,) = json.loads(data)["choices"]
                generation.sent += choice["token_ids"] or []
                events, data = events + 1, b""
            if events == EVENTS and not self.killed.is_set():
                self._kill()
                raise aiohttp.ClientConnectionError("what it sent since does not arrive")

    def _kill(self) -> None:
        assert self.server._process is not None
        for pid in reversed(family(self.server._process.pid)):
            os.kill(pid, signal.SIGKILL)
        self.killed.set()


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


@pytest.mark.parametrize("name", ["pi", "claude_code"])
async def test_answer_of_a_killed_vllm_is_continued_by_the_next_one(
    name: str, tap: Tap, model: Path, tmp_path: Path, unused_tcp_port: int
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
            playing = asyncio.create_task(_answers(control, name, tmp_path / "trial"))
            killed = asyncio.create_task(tap.killed.wait())
            await asyncio.wait([playing, killed], return_when=asyncio.FIRST_COMPLETED)
            assert tap.killed.is_set()
            await tap.server.start()
            turns = await playing
    finally:
        await proxy.stop()
        await runner.cleanup()
    first, second, *others = tap.generations
    answer = first.sent + second.sent
    assert 0 < len(first.sent) < len(answer)
    assert second.prompt == first.prompt + first.sent
    assert [turn.status for turn in turns] == [TurnStatus.DONE] * len(turns)
    found = [turn.sampled_ids.tolist() for turn in turns]
    assert found == [answer, *(other.sent for other in others)]


async def _answers(control: ProxyClient, name: str, folder: Path) -> list[Turn]:
    """The turns of an agent in a trial of its own.

    Pi takes an answer that reaches the limit of 64 tokens; Claude Code requests it again.
    """
    rollout = await trial(
        control,
        example(name),
        folder,
        "Say it.",
        sampling=LONG,
        timeout_s=2 * START_S,
        check=["true"],
    )
    log = (Path(rollout.logs or os.devnull) / "agent.log").read_text(errors="replace")[-3000:]
    assert rollout.status is RolloutStatus.TRUNCATED, f"{rollout.error}\n{log}"
    _, turns = await control.get_turns(rollout.trial_id)
    return turns
