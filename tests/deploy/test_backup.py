"""A store is copied while its proxy serves calls, and another proxy continues from the copy.

The commands are those of docs/operations.md.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from proxy.client import ProxyClient, SessionHandle
from proxy.records import TurnStatus
from proxy.testing.scripted_engine import ScriptedEngine
from tests.deploy.manifests import ROOT
from tests.deploy.test_several_proxies import ANSWER, KEY, Replica
from tests.postgres_server import empty_database
from tests.proxy.checkpoint import write_checkpoint

Backup = Callable[[], str]
"""Copies the store and restores the copy elsewhere. Returns the URL of the new store."""


def documented(words: str) -> str:
    """The block of commands of docs/operations.md that contains these words."""
    text = (ROOT / "docs/operations.md").read_text()
    (found,) = [b for b in re.findall(r"```bash[^\n]*\n(.*?)```", text, re.S) if words in b]
    return str(found)


def run(commands: str, folder: Path, **variables: str) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, **variables, "PATH": path}
    subprocess.run(["bash", "-euc", commands], cwd=folder, env=environment, check=True)


@pytest.fixture(params=["sqlite", "postgres"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Backup]:
    if request.param == "sqlite":

        def backup_file() -> str:
            run(documented("python3 -c"), tmp_path)
            return f"sqlite:///{tmp_path}/backup.db"

        return f"sqlite:///{tmp_path}/proxy.db", backup_file
    server = request.getfixturevalue("postgres")
    url, restored = await empty_database(server), await empty_database(server)

    def backup_database() -> str:
        run(documented("pg_dump"), tmp_path, STORE=url)
        run(documented("pg_restore"), tmp_path, STORE=restored)
        return restored

    return url, backup_database


@asynccontextmanager
async def serving(store: str, model: Path, engine: str) -> AsyncIterator[Replica]:
    settings = {
        "AGENTIC_PROXY_ADMIN_KEY": KEY,
        "AGENTIC_PROXY_MODEL": str(model),
        "AGENTIC_PROXY_STORE": store,
        "AGENTIC_PROXY_ENGINES": f'[{{"url": "{engine}"}}]',
    }
    replica = Replica(0, model, settings)
    await replica.start()
    try:
        yield replica
    finally:
        await replica.kill()


async def ask(replica: Replica, session: SessionHandle, messages: list[dict[str, Any]]) -> None:
    """Sends the conversation and appends the answer."""
    url = f"http://127.0.0.1:{replica.port}/v1/chat/completions"
    headers = {"Authorization": f"Bearer {session.api_key}"}
    body = {"model": "m", "messages": messages}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(url, json=body) as response,
    ):
        assert response.status == 200, await response.text()
        messages.append((await response.json())["choices"][0]["message"])


@pytest.mark.slow
async def test_copy_of_a_store_in_use_continues_its_sessions(
    store: tuple[str, Backup], tmp_path: Path
) -> None:
    url, backup = store
    model = write_checkpoint(tmp_path / "model")
    messages: list[dict[str, Any]] = []
    async with ScriptedEngine(lambda _: ANSWER) as engine:
        async with (
            serving(url, model, engine.url) as replica,
            ProxyClient(f"http://127.0.0.1:{replica.port}", KEY) as control,
        ):
            session = await control.create_session("kept")
            for number in range(3):
                messages.append({"role": "user", "content": f"Question {number}."})
                await ask(replica, session, messages)
            _, before = await control.get_turns("kept")
            engine.called.clear()
            engine.token_delay_s = 60.0
            running = asyncio.create_task(
                ask(replica, session, [*messages, {"role": "user", "content": "Too late."}])
            )
            await engine.called.wait()
            copy = await asyncio.to_thread(backup)
        with pytest.raises(aiohttp.ClientConnectionError):
            await running
        engine.token_delay_s = 0.0
        async with (
            serving(copy, model, engine.url) as replica,
            ProxyClient(f"http://127.0.0.1:{replica.port}", KEY) as control,
        ):
            messages.append({"role": "user", "content": "And now?"})
            await ask(replica, session, messages)
            _, after = await control.get_turns("kept")
    assert [turn.status for turn in after[:3]] == [TurnStatus.DONE] * 3
    for old, new in zip(before, after, strict=False):
        assert np.array_equal(old.sampled_ids, new.sampled_ids)
    in_flight, last = after[3:]
    assert in_flight.status is TurnStatus.CUT
    assert last.status is TurnStatus.DONE
    assert last.parent == 2
    assert last.shared_tokens == after[2].path_tokens
