"""A harbor-server in this process, with scripted trials."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import patch

from aiohttp.test_utils import TestServer

from harbor_sdk import AgentRun, AgentRunRequest, RunStatus
from harbor_sdk.server.app import build_app
from harbor_sdk.server.config import ServerConfig

TOKEN = "a-token-of-the-tests"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


class ScriptedTrials:
    """Trials that end with `outcome` immediately, or, for the agent `waits`, when `gate` opens."""

    def __init__(self, **outcome: object) -> None:
        self.outcome = {"status": RunStatus.COMPLETED, "rewards": {"reward": 1.0}, **outcome}
        self.requests: list[AgentRunRequest] = []
        self.began = asyncio.Event()
        self.gate = asyncio.Event()
        self.started: list[str] = []
        self.ended_by_cancel: list[str] = []
        self.at_once = self.most_at_once = 0

    async def __call__(
        self,
        request: AgentRunRequest,
        *,
        run_id: str,
        task_dir: Path | None,
        trials_dir: Path,
        hidden: Sequence[Path],
        on_phase: Callable[[str], Awaitable[None]],
    ) -> AgentRun:
        self.started.append(run_id)
        self.requests.append(request)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        (trials_dir / run_id / "agent").mkdir(parents=True)
        if request.agent.name != "has no log":
            (trials_dir / run_id / "trial.log").write_text("the log")
        (trials_dir / run_id / "agent/out.txt").write_text("the agent's output")
        (trials_dir / run_id / "agent/passwd").symlink_to("/etc/passwd")
        try:
            await on_phase("agent-start")
            self.began.set()
            if request.agent.name == "waits":
                await self.gate.wait()
            if request.agent.name == "breaks":
                raise RuntimeError("no such image")
        except asyncio.CancelledError:
            self.ended_by_cancel.append(run_id)
            raise
        finally:
            self.at_once -= 1
        name = task_dir.name if task_dir else request.task_name
        return AgentRun.model_validate(
            {"run_id": run_id, "metadata": {"task": name}, **self.outcome}
        )


@asynccontextmanager
async def serving(tmp_path: Path, trials: ScriptedTrials, **settings: object) -> AsyncIterator[str]:
    """Yields the server's URL. Clients find its token in the environment while it runs."""
    config = ServerConfig.model_validate(
        {"state_dir": tmp_path / "state", "token": TOKEN, **settings}
    )
    server = TestServer(build_app(config, trials))
    await server.start_server()
    try:
        with patch.dict(os.environ, HARBOR_SERVER_TOKEN=config.token):
            yield str(server.make_url("/"))
    finally:
        await server.close()
