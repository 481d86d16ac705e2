"""Phoenix as the collector of a proxy: it knows calls, tools and sessions by their attributes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from proxy.port import free_port
from proxy.telemetry import trial_context
from tests.needs import needs
from tests.proxy.conftest import StartProxy, checkpoint, rendering, start_proxy  # noqa: F401
from tests.proxy.view.recording import work

PROGRAM = Path(__file__).parents[2] / ".cache/phoenix/bin/phoenix"
pytestmark = [
    pytest.mark.long,
    needs(None if PROGRAM.exists() else "run make phoenix"),
]
START_S = 240.0
"""It takes 15 s on a free core."""


@pytest.fixture
async def phoenix(tmp_path: Path) -> AsyncIterator[str]:
    """The URL of a Phoenix that has started."""
    http, grpc = free_port("127.0.0.1"), free_port("127.0.0.1")
    settings = {
        "PHOENIX_WORKING_DIR": str(tmp_path / "phoenix"),
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": str(http),
        "PHOENIX_GRPC_PORT": str(grpc),
        "PHOENIX_TELEMETRY_ENABLED": "false",
    }
    url = f"http://127.0.0.1:{http}"
    with (tmp_path / "phoenix.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            PROGRAM, "serve", env={**os.environ, **settings}, stdout=log, stderr=log
        )
    try:
        async with asyncio.timeout(START_S), aiohttp.ClientSession() as client:
            while not await answers(client, f"{url}/healthz"):
                assert process.returncode is None, (tmp_path / "phoenix.log").read_text()
                await asyncio.sleep(0.5)
        yield url
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def answers(client: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with client.get(url) as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


async def test_phoenix_shows_calls_and_tools_of_a_session(
    phoenix: str,
    start_proxy: StartProxy,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    proxy = await start_proxy(telemetry={"endpoint": phoenix})
    session = await proxy.session(trial_id="fix-1")
    await work(proxy, session, "Correct the sum.", turns=3)
    _, turns = await proxy.record(session)
    spans: list[dict[str, Any]] = []
    async with asyncio.timeout(60), aiohttp.ClientSession() as client:
        while len(spans) < 5:
            await asyncio.sleep(0.2)
            async with client.get(f"{phoenix}/v1/projects/default/spans") as response:
                spans = (await response.json()).get("data", []) if response.status == 200 else []
    kinds = sorted((span["span_kind"], span["name"]) for span in spans)
    assert kinds == [*[("LLM", "chat m")] * 3, *[("TOOL", "execute_tool shell")] * 2]
    trace = f"{trial_context('fix-1').trace_id:032x}"
    assert {span["context"]["trace_id"] for span in spans} == {trace}
    calls = sorted(
        (span for span in spans if span["span_kind"] == "LLM"), key=lambda each: each["start_time"]
    )
    for span, turn in zip(calls, turns, strict=True):
        assert span["attributes"]["llm.token_count.prompt"] == turn.prompt_tokens
        assert span["attributes"]["llm.token_count.completion"] == len(turn.sampled_ids)
        assert span["attributes"]["session.id"] == "fix-1"
