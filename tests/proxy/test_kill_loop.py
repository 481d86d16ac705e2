"""Agents at work while the proxy's process is killed again and again with `kill -9`.

No answered turn is lost, none is recorded twice, and every trial completes on one path. A longer
run: `KILLS=100 pytest tests/proxy/test_kill_loop.py`.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import sys
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
import yaml

from proxy.client import ProxyClient, ProxyClientError, SessionHandle
from proxy.conversation import load_answer
from proxy.engines.scripted import ScriptedEngine, text_script
from proxy.records import TurnStatus
from proxy.rendering.rendering import Rendering
from proxy.token_tree import TokenTree

KILLS = int(os.environ.get("KILLS", "3"))
AGENTS = 4
TURNS_PER_KILL = 10
"""Answers between two kills, all agents together."""
ADMIN_KEY = "of-the-kill-loop"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ProxyProcess:
    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.config = folder / "proxy.yaml"
        self.config.write_text(yaml.safe_dump(settings))
        self.log = folder / "proxy.log"
        self.process: asyncio.subprocess.Process | None = None
        self.up = asyncio.Event()

    async def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "proxy", "serve", "--config", str(self.config)),
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=os.environ | {"AGENTIC_PROXY_ADMIN_KEY": ADMIN_KEY},
            )
        assert self.process.stdout is not None
        async with asyncio.timeout(60):
            assert await self.process.stdout.readline(), self.log.read_text()
        self.up.set()

    async def kill(self) -> None:
        assert self.process is not None
        self.up.clear()
        with suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


class Agent:
    """A conversation of `turns` calls, each repeated until it is answered."""

    def __init__(self, session: SessionHandle, proxy: ProxyProcess, answered: asyncio.Queue[int]):
        self.session, self.proxy, self.answered = session, proxy, answered
        self.answers: list[str] = []

    async def run(self, turns: int, rng: random.Random) -> None:
        messages: list[dict[str, str]] = [{"role": "user", "content": "Begin."}]
        async with aiohttp.ClientSession() as http:
            for turn in range(turns):
                answer = await self._answer(http, messages, stream=rng.random() < 0.5)
                self.answers.append(answer)
                messages += [
                    {"role": "assistant", "content": answer},
                    {"role": "user", "content": f"Go on, {turn}."},
                ]
                self.answered.put_nowait(turn)

    async def _answer(
        self, http: aiohttp.ClientSession, messages: list[dict[str, str]], *, stream: bool
    ) -> str:
        while True:
            await self.proxy.up.wait()
            try:
                return await self._call(http, messages, stream=stream)
            except (aiohttp.ClientError, ConnectionError):
                await asyncio.sleep(0)  # the proxy has died: it will be up again

    async def _call(
        self, http: aiohttp.ClientSession, messages: list[dict[str, str]], *, stream: bool
    ) -> str:
        body = {"model": "m", "messages": messages, "stream": stream}
        headers = {"Authorization": f"Bearer {self.session.api_key}"}
        url = f"{self.session.base_url}/chat/completions"
        async with http.post(url, json=body, headers=headers) as response:
            data = await response.read()
            assert response.status == 200, data
        if not stream:
            return str(orjson.loads(data)["choices"][0]["message"]["content"])
        *events, last, _ = data.split(b"\n\n")
        if last != b"data: [DONE]":
            raise aiohttp.ClientPayloadError("the stream has no end")
        chunks = [orjson.loads(event.removeprefix(b"data: ")) for event in events]
        return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


@pytest.mark.parametrize("seed", [random.randrange(10**6)])
async def test_nothing_answered_is_lost_and_nothing_is_twice(
    checkpoint: Path, rendering: Rendering, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    encode, end = rendering.tokenizer.encode, rendering.stop_token_ids[:1]
    script = text_script(
        lambda prompt: f"That is {len(prompt)} characters, thank you.",
        decode=rendering.tokenizer.decode,
        encode=encode,
        end_ids=end,
    )
    async with ScriptedEngine(script, token_delay_s=0.001) as engine, AsyncExitStack() as stack:
        port = free_port()
        settings = {
            "model": str(checkpoint),
            "port": port,
            "engines": [{"url": engine.url}],
            "store": f"sqlite:///{tmp_path}/sessions.db",
        }
        proxy = ProxyProcess(tmp_path, settings)
        stack.push_async_callback(proxy.kill)
        await proxy.start()
        answered: asyncio.Queue[int] = asyncio.Queue()
        turns = TURNS_PER_KILL * (KILLS + 1) // AGENTS + 1
        async with ProxyClient(f"http://127.0.0.1:{port}", ADMIN_KEY) as control:
            agents = [Agent(await control.create_session(), proxy, answered) for _ in range(AGENTS)]
            running = [
                asyncio.create_task(agent.run(turns, random.Random(rng.random())))
                for agent in agents
            ]
            for _ in range(KILLS):
                for _ in range(rng.randint(1, TURNS_PER_KILL)):
                    await answered.get()
                await asyncio.sleep(rng.random() * 0.05)  # any moment of a call, not just its end
                await proxy.kill()
                await proxy.start()
            await asyncio.gather(*running)
            for agent in agents:
                _, recorded = await control.get_turns(agent.session.trial_id)
                done = [turn for turn in recorded if turn.status is TurnStatus.DONE]
                assert [load_answer(turn.answer).text for turn in done] == agent.answers
                assert {turn.status for turn in recorded} <= {TurnStatus.DONE, TurnStatus.CUT}
                path = TokenTree(recorded).path(done[-1].index).tolist()
                for turn in done:
                    prompt = path[: turn.prompt_tokens]
                    assert path[turn.prompt_tokens : turn.path_tokens] == turn.sampled_ids.tolist()
                    assert any(call.prompt_ids == prompt for call in engine.calls)
            with pytest.raises(ProxyClientError):
                await control.show("never-created")
