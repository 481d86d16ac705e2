"""`kill -9` of the proxy between two turns of a running agent, on a real vLLM.

The agent's next call reaches a proxy that has nothing in memory, and continues the same path.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from agent_loop.trajectory import build_segments, flatten
from proxy.client import ProxyClient, SessionHandle
from proxy.engines.vllm_server import VllmServer
from proxy.records import Turn, TurnStatus
from tests.e2e.patient_agent import TURNS

pytestmark = pytest.mark.engine
ADMIN_KEY = "of-the-test"


class Proxy:
    """A proxy process on one port and one store, killed and started again."""

    def __init__(self, folder: Path, model: Path, engine_url: str, port: int, **more: Any) -> None:
        """`more`: further keys of its configuration."""
        self.config = folder / "proxy.yaml"
        self.url = f"http://127.0.0.1:{port}"
        settings = {
            "model": str(model),
            "port": port,
            "engines": [{"url": engine_url}],
            "store": f"sqlite:///{folder}/sessions.db",
            **more,
        }
        self.config.write_text(yaml.safe_dump(settings))
        self.log = folder / "proxy.log"
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "proxy", "serve", "--config", str(self.config)),
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=os.environ | {"AGENTIC_PROXY_ADMIN_KEY": ADMIN_KEY},
            )
        assert self.process.stdout is not None
        first = await asyncio.wait_for(self.process.stdout.readline(), 60)
        assert first, self.log.read_text()

    async def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        await self.process.wait()

    async def stop(self) -> None:
        assert self.process is not None
        if self.process.returncode is None:
            self.process.terminate()
            await self.process.wait()


async def start_agent(session: SessionHandle) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, str(Path(__file__).with_name("patient_agent.py"))),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ
        | {
            "OPENAI_BASE_URL": session.base_url,
            "OPENAI_API_KEY": session.api_key,
            "AGENT_MODEL": "tiny",
        },
    )


def assert_one_path(turns: list[Turn]) -> None:
    assert [turn.status for turn in turns] == [TurnStatus.DONE] * TURNS
    assert [turn.parent for turn in turns] == [None, *range(TURNS - 1)]
    for before, turn in itertools.pairwise(turns):
        assert turn.shared_tokens == before.path_tokens
        assert turn.fork_cause is None
    (trajectory,) = flatten(build_segments(turns))
    sampled = np.concatenate([turn.sampled_ids for turn in turns])
    assert np.array_equal(trajectory.ids[trajectory.mask], sampled)


async def test_trial_whose_proxy_is_killed_between_all_its_turns_is_one_path(
    vllm: VllmServer, tiny_model: Path, tmp_path: Path, unused_tcp_port: int
) -> None:
    proxy = Proxy(tmp_path, tiny_model, vllm.url, unused_tcp_port)
    await proxy.start()
    try:
        async with ProxyClient(proxy.url, ADMIN_KEY) as control:
            session = await control.create_session("killed")
            agent = await start_agent(session)
            assert agent.stdin is not None
            assert agent.stdout is not None
            for turn in range(TURNS):
                assert await agent.stdout.readline() == f"{turn + 1}\n".encode()
                await proxy.kill()
                agent.stdin.write(b"go on\n")  # it calls while no proxy listens
                await proxy.start()
            assert await agent.wait() == 0
            _, turns = await control.get_turns("killed")
        assert_one_path(turns)
    finally:
        await proxy.stop()
