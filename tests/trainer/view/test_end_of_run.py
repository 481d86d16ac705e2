"""The page of a run that ends, fails or is killed while the page is open, in a real Chromium."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from proxy.rendering.rendering import Rendering
from tests.needs import needs
from tests.proxy.conftest import ADMIN_KEY, starting_proxies
from tests.proxy.extras.view.chromium import MISSING, Tab
from tests.proxy.extras.view.conftest import enter, show
from tests.trainer.view.recorded_run import RecordedTraining, begin, training, whole
from trainer.extras.report import write_report

pytestmark = [needs(MISSING), pytest.mark.programs]

BADGE = "document.querySelector('.connection').textContent"
HEAD = "document.querySelector('.run-head')?.textContent ?? ''"
LOST = "document.querySelector('.lost')"


@asynccontextmanager
async def watched(
    tab: Tab, checkpoint: Path, rendering: Rendering, folder: Path
) -> AsyncIterator[RecordedTraining]:
    """A run after its first step whose page is open; at the end of the context its proxy ends."""
    async with starting_proxies(checkpoint, rendering, folder) as start:
        begun = begin(folder / "run", checkpoint, trainer={"steps": 3})
        proxy, run = await training(start, begun)
        await run.evaluate("before")
        await run.step()
        await enter(tab, proxy, "/run/run")
        await tab.until(f"({HEAD}).includes('1 of 3')")
        assert "live" in await tab.evaluate(BADGE)
        yield run
        run.log.close()
        run.folder.unlock()


async def test_page_shows_the_end_of_a_run_after_its_server_is_gone(
    checkpoint: Path, rendering: Rendering, tmp_path: Path, tab: Tab
) -> None:
    async with watched(tab, checkpoint, rendering, tmp_path) as run:
        await run.step()
        await run.step()
        await run.evaluate("after")
        run.log.finish("done")
    await tab.until(LOST)
    assert "The server has ended: everything here is as of" in await tab.text(".lost")
    assert f"agentic-proxy view {tmp_path}/run" in await tab.text(".lost")
    assert (await tab.evaluate(BADGE)).startswith("as of ")
    head = await tab.evaluate(HEAD)
    assert "statusdone" in head
    assert "3 of 3" in head
    assert "running" not in head
    evaluations = await tab.text("section[aria-labelledby=evaluations-title]")
    assert "after" in evaluations
    labels = "document.querySelector('.chart svg').ariaLabel"
    assert "at step 3" in await tab.evaluate(labels)
    await tab.evaluate("location.hash = '#/now'")
    await tab.until("document.querySelector('h1').textContent.startsWith('As of')")
    assert "calls running0" in await tab.evaluate("document.querySelector('.tiles').textContent")


async def test_page_shows_why_a_run_failed(
    checkpoint: Path, rendering: Rendering, tmp_path: Path, tab: Tab
) -> None:
    async with watched(tab, checkpoint, rendering, tmp_path) as run:
        run.log.finish("failed", error="KeyError: 'advantages'")
    await tab.until(f"({HEAD}).includes('statusfailed')")
    assert await tab.text(".run-head [role=alert]") == "KeyError: 'advantages'"
    assert "Verdict: failing" in await tab.text(".verdict")


async def test_page_says_that_a_run_was_killed(
    checkpoint: Path, rendering: Rendering, tmp_path: Path, tab: Tab
) -> None:
    async with watched(tab, checkpoint, rendering, tmp_path):
        pass  # the trainer says nothing more
    await tab.until(f"({HEAD}).includes('statuskilled')")
    assert "agentic-train resume" in await tab.text(".verdict")


async def test_head_of_a_run_has_what_it_is_made_of_its_cost_and_its_report(
    checkpoint: Path, rendering: Rendering, tmp_path: Path, tab: Tab
) -> None:
    async with watched(tab, checkpoint, rendering, tmp_path) as run:
        facts = "[...document.querySelectorAll('.run-head dt')].map(each => each.textContent)"
        names = ("status", "step", "time", "left", "model", "tokens", "machine-hours", "cost")
        await run.step()  # what is left is known from two
        await tab.until(f"({facts}).includes('left')")
        assert set(names) <= set(await tab.evaluate(facts))
        assert "Configuration: " in await tab.evaluate(HEAD)
        assert await tab.evaluate("document.querySelector('.cost')") is None
        price = "const field = document.querySelector('.run-head input'); field.value = '3600000';"
        await tab.evaluate(f"{price} field.dispatchEvent(new Event('change'))")
        cost = "Number(document.querySelector('.cost')?.textContent ?? 0)"
        await tab.until(f"{cost} > 0")  # of the seconds since the run began, 1,000 each
        url, query = f"{run.agent.proxy.url}/view/run/report", {"run": "run"}
        reader = {"Authorization": f"Bearer {ADMIN_KEY}"}
        http = run.agent.proxy.http
        async with http.get(url, params=query, headers=reader) as response:
            assert response.status == 404
        run.log.finish("done")
        await asyncio.to_thread(write_report, run.folder)
        await tab.call("Page.reload")
        await tab.until("document.querySelector('.run-head a[download$=html]')")
        async with http.get(url, params=query) as response:
            assert response.status == 401
        async with http.get(url, params=query, headers=reader) as response:
            assert "sandbox" in response.headers["Content-Security-Policy"]
            assert response.headers["Content-Disposition"].startswith("attachment")
            assert await response.read() == (run.folder.path / "report.html").read_bytes()
        (run.folder.path / "report.html").unlink()
        (run.folder.path / "report.html").symlink_to("/etc/hostname")
        async with http.get(url, params=query, headers=reader) as response:
            assert response.status == 404


async def test_view_of_an_ended_run_is_recorded_and_says_when_it_is_lost(
    checkpoint: Path, rendering: Rendering, tmp_path: Path, tab: Tab
) -> None:
    async with starting_proxies(checkpoint, rendering, tmp_path) as start:
        _, run = await training(start, begin(tmp_path / "run", checkpoint))
        await whole(run)
    program = Path(sys.executable).with_name("agentic-proxy")
    viewer = await asyncio.create_subprocess_exec(
        program, "view", run.folder.path, "--port", "0", stdout=asyncio.subprocess.PIPE
    )
    try:
        assert viewer.stdout is not None
        said = (await viewer.stdout.readline()).decode()
        # not on a terminal: the file with the link is named
        await tab.open(Path(said.partition("the link in ")[2].partition(" opens")[0]).read_text())
        await tab.until("document.querySelector('.run-head')")
        assert await tab.evaluate(BADGE) == "recorded"
        await tab.until("document.title === 'Run · agentic-proxy'")
    finally:
        viewer.kill()
        await viewer.wait()
    await tab.until(LOST)
    assert "No connection since" in await tab.text(".lost")
    assert f"agentic-proxy view {tmp_path}/run" in await tab.text(".lost")
    assert (await tab.evaluate(BADGE)).startswith("as of ")


async def test_a_group_shows_rewards_and_advantages_and_unknown_views_say_so(
    checkpoint: Path, rendering: Rendering, tmp_path: Path, tab: Tab
) -> None:
    async with watched(tab, checkpoint, rendering, tmp_path):
        await show(tab, "/group/run?step=1&group=g0-0", "document.querySelector('.rewards')")
        rows = "[...document.querySelectorAll('.rewards tbody tr')].map(row => row.innerText)"
        table = await tab.evaluate(rows)
        assert len(table) == 4
        assert any("+" in row for row in table)
        assert any("\N{MINUS SIGN}" in row for row in table)
        assert "failed" in table[-1]
        assert (
            await tab.evaluate("document.title") == "Group g0-0 of step 1, run run · agentic-proxy"
        )
        await show(tab, "/nowhere/x", "document.querySelector('h1').textContent === 'Not found'")
        assert await tab.evaluate("document.title") == "Not found · agentic-proxy"
        # Steps have more than one tick, and equal values an axis around them.
        ticks = await tab.evaluate(
            "import('/view/static/chart.js').then(({stepTicks, ticks}) => [stepTicks(1, 36),"
            " ticks(50.2, 50.2)])"
        )
        assert ticks[0][0] == 1
        assert ticks[0][-1] == 36
        assert len(ticks[0]) >= 4
        assert ticks[1][-1] - ticks[1][0] > 1
        # What is said to be trained was.
        groups = "[[[0, 1], [0, 1]], [[3, 1], [0, 0]], [[0, 1], [0, 0]], [[null, 1]]]"
        trained = await tab.evaluate(
            f"import('/view/static/group.js').then(({{trainedOf}}) => {groups}.map(each =>"
            " trainedOf(each.map(([trained_tokens, reward]) => ({trained_tokens, reward})))))"
        )
        assert trained == [
            "none was trained, because their rewards are equal",
            "1 of 2 were trained",
            "none was trained",
            "what was trained of it is not recorded",
        ]
        # Messages that are the same do not part.
        parts = await tab.evaluate(
            "import('/view/static/group.js').then(({parting}) => [['abc', 'abc'], ['abc', 'abd']]"
            ".map(texts => Boolean(parting(texts.map(text => ({items: [{message: {text}}]})), 0))))"
        )
        assert parts == [False, True]
        numbers = await tab.evaluate(
            "import('/view/static/format.js').then(({number, share, many}) => [number(0.00008075),"
            " share(0.9844), share(0.996), many(1, 'step')])"
        )
        assert numbers == ["8.07e-5", "98 %", "99.6 %", "1 step"]
