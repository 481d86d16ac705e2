"""Phoenix as the collector of a proxy: it knows calls, tools and sessions by their attributes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.extras.telemetry.spans import trial_context
from tests.e2e import phoenix as program
from tests.e2e.phoenix import Phoenix
from tests.needs import needs
from tests.proxy.conftest import StartProxy, checkpoint, rendering, start_proxy  # noqa: F401
from tests.proxy.extras.view.recording import work

pytestmark = [pytest.mark.long, needs(program.MISSING)]


@pytest.fixture
def phoenix(tmp_path: Path) -> Iterator[Phoenix]:
    with program.running(tmp_path) as running:
        yield running


async def test_phoenix_shows_calls_and_tools_of_a_session(
    phoenix: Phoenix,
    start_proxy: StartProxy,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    proxy = await start_proxy(telemetry={"endpoint": phoenix.url})
    session = await proxy.session(trial_id="fix-1")
    await work(proxy, session, "Correct the sum.", turns=3)
    _, turns = await proxy.record(session)
    spans = await asyncio.to_thread(phoenix.spans, lambda found: len(found) >= 5)
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
