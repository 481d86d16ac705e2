"""The views of a run in a real Chromium, on a run that the trainer's code wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from agent_loop.producers.protocol import Production
from agent_loop.records import Rollout, RolloutStatus, Task
from proxy.config import ListenConfig
from proxy.extras.rules.rules import save_rule
from proxy.extras.view.access import new_link
from proxy.extras.view.command import build_view
from proxy.extras.view.run_folder import reading
from proxy.extras.view.runs import RecordedRuns
from proxy.http.server import app_runner
from proxy.run_files.intervals import wilson_interval
from proxy.store import open_store
from tests.needs import needs, skip_or_fail
from tests.proxy.conftest import StartProxy
from tests.proxy.extras.view.chromium import MISSING, Tab
from tests.proxy.extras.view.conftest import enter, show
from tests.proxy.extras.view.recording import HOSTILE, call, user
from tests.proxy.extras.view.test_page import AXE, NO_OVERFLOW, violations
from tests.trainer.view.recorded_run import begin, training, whole, write_log
from tests.trainer.view.screenshots import views

EXAMPLE = ((56, 70), (48, 80))

pytestmark = [needs(MISSING), pytest.mark.programs]


async def opened(tab: Tab, store_url: str, *folders: Path) -> AsyncExitStack:
    """Opens the page on recorded runs; the stack closes what serves it."""
    closes = AsyncExitStack()
    store = await open_store(store_url, create=False)
    closes.push_async_callback(store.close)
    runner = app_runner(build_view(ListenConfig(), store, None, RecordedRuns(list(folders))))
    await runner.setup()
    closes.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    link = await new_link(store.browser)
    await tab.open(f"http://127.0.0.1:{runner.addresses[0][1]}/#link={link}")
    await tab.until("document.querySelector('header .dot.on')")
    return closes


async def test_every_view_of_a_run_is_accessible_and_fits_a_phone(
    start_proxy: StartProxy, checkpoint: Path, tmp_path: Path, tab: Tab
) -> None:
    if not AXE.is_file():
        skip_or_fail("axe-core is not installed: python -m benchmarks.install tools")
    proxy, run = await training(start_proxy, begin(tmp_path / "run", checkpoint))
    await whole(run)
    write_log(run.folder.path, "lamps-4", "done")
    shown = views("run", 1, "g0-0", "lamps-4")
    await enter(tab, proxy)
    await tab.call("Page.setBypassCSP", enabled=True)  # for axe, which the page would not run
    await tab.call("Page.reload")
    await tab.until("document.querySelector('header .dot.on')")
    await tab.evaluate(AXE.read_text() + "; undefined")
    found = {}
    for scheme in ("light", "dark"):
        await tab.colours(scheme)
        for name, (place, ready) in shown.items():
            await show(tab, place, ready)
            found[f"{name}, {scheme}"] = await violations(tab)
    await show(tab, *shown["run"])
    # Success and reward of two evaluations.
    assert await tab.evaluate("document.querySelectorAll('.chart .interval').length") == 4
    assert not any(found.values()), {name: wrong for name, wrong in found.items() if wrong}
    await tab.size(390, 844, phone=True)
    for name, (place, ready) in shown.items():
        await show(tab, place, ready)
        assert await tab.evaluate(NO_OVERFLOW), f"{name} is wider than a phone"
    assert tab.complaints == []


async def test_what_a_trials_agent_and_verifier_wrote_is_read_from_its_end(
    start_proxy: StartProxy, checkpoint: Path, tmp_path: Path, tab: Tab
) -> None:
    proxy, run = await training(start_proxy, begin(tmp_path / "run", checkpoint))
    await run.step()
    hostile = "\x1b[31mred\x1b[0m " + HOSTILE
    write_log(run.folder.path, "lamps-1", "first line\n" + "é" * 60_000 + hostile + "last line")
    await enter(tab, proxy, "/trial/lamps-1")
    await tab.until("document.querySelector('.of-run')")
    assert "In run, step 1: done reward 0" in " ".join((await tab.text(".of-run")).split())
    assert "wanted 28" in await tab.text(".files details:first-child")
    log = ".files details:last-child"
    await tab.click(f"{log} summary")
    shown = f"document.querySelector('{log} .text').textContent"
    assert "red " in await tab.evaluate(shown)
    assert "[31m" not in await tab.evaluate(shown)
    await tab.click(f"{log} button")
    await tab.until(f"{shown}.length > 20000")
    await tab.click(f"{log} button")
    await tab.until(f"{shown}.startsWith('first line')")
    assert "\ufffd" not in (await tab.evaluate(shown))
    assert (await tab.evaluate(shown)).endswith("last line")
    assert not await tab.evaluate("'hacked' in window")
    await tab.click(".of-run a:last-of-type")
    await tab.until("document.querySelectorAll('.aligned thead th').length === 4")
    run.log.close()
    assert tab.complaints == []


async def test_curves_grow_while_the_run_trains_and_keys_open_the_groups_of_a_step(
    start_proxy: StartProxy, checkpoint: Path, tmp_path: Path, tab: Tab
) -> None:
    proxy, run = await training(start_proxy, begin(tmp_path / "run", checkpoint))
    async with reading(run.folder.sessions) as browser:
        rule = {"name": "multiplies", "query": {"text": "because 4", "answers_only": True}}
        await save_rule(browser, rule)
    await enter(tab, proxy, "/run")
    await tab.until("document.body.innerText.includes('No step has ended yet')")
    producer: Any = SimpleNamespace(production=Production(3, 4, 5, max_staleness=1))
    run.log.follow(producer)
    run.log.phase(1, "sampling", 8)
    failed = Rollout("lost", Task("t", {}), RolloutStatus.FAILED, None, error="the disk is full")
    run.log.trial_ended(failed)
    await show(tab, "/now", "document.querySelector('.training .errors li')")
    shown = await tab.text(".training")
    assert "1 of 8 trials ended, 1 failed" in shown
    assert "The trainer waits for 1 more group: 3 of 4 groups are ready, 5 run" in shown
    assert "the disk is full" in shown
    await show(tab, "/run", "document.body.innerText.includes('No step has ended yet')")
    await run.step()
    await tab.until("document.querySelectorAll('.groups tbody tr').length === 2")
    assert "Groups of step 1" in await tab.text("#step")
    await run.step()
    await tab.until("document.querySelector('#step-title').textContent.includes('step 2')")
    await tab.evaluate("document.querySelector('.charts').focus()")
    await tab.press("ArrowLeft", 37)
    await tab.until("document.querySelector('.chart svg').ariaLabel.includes('at step 1')")
    await tab.press("Enter", 13)
    await tab.until("location.hash === '#/run/run?step=1'")
    await tab.until("document.querySelector('#step-title').textContent.includes('step 1')")
    await tab.until("document.querySelector('.groups tbody a').href.includes('step=1')")
    await tab.click(".chart summary")
    await tab.until("document.querySelector('.chart .about').open")
    assert "rollout/success (share, 0 to 1): Judged trials" in await tab.text(".chart .about")
    assert await tab.evaluate("location.hash") == "#/run/run?step=1"
    await tab.click(".groups tbody a")
    await tab.until("document.querySelectorAll('.aligned thead th').length === 4")
    await tab.until("document.querySelector('.parting q')")
    assert "Let me multiply" in await tab.evaluate("document.querySelector('.shared').textContent")
    row = "[...document.querySelectorAll('main section:last-child tbody tr')].find(row => row"
    await show(
        tab, "/now", f"{row}.innerText.includes('lamps-1'))?.cells[2].innerText === '\\u2013'"
    )
    session = await proxy.session(trial_id="waits")
    await call(proxy, session, [user("Hi.")])
    waits = f"{row}.innerText.includes('waits'))"
    await tab.until(f"{waits}?.cells[2].innerText === 'its agent'")
    assert await tab.evaluate(f"{waits}.cells[5].innerText") == "0"
    await proxy.control.complete("waits")
    await tab.until(f"{waits}.cells[2].innerText === '\\u2013'")
    run.log.close()
    await tab.until("!document.querySelector('.training')")
    rows = "document.querySelectorAll('.run-trials tbody tr').length"
    await show(tab, "/trials/run", f"{rows} === 16")
    field = "document.querySelector('input[name=marked]')"
    change = "new Event('change', {bubbles: true})"
    await tab.evaluate(f"{field}.value = 'multiplies'; {field}.dispatchEvent({change})")
    await tab.until("location.hash === '#/trials/run?marked=multiplies'")
    await tab.until(f"{rows} === 4")
    assert "multiplies" in await tab.text(".run-trials tbody tr:last-child")
    await show(tab, "/trials/run?marked=other", "document.querySelector('main p.quiet')")
    assert tab.complaints == []


async def test_runs_are_drawn_over_each_other_with_what_differs_in_their_configurations(
    start_proxy: StartProxy, checkpoint: Path, tmp_path: Path, tab: Tab
) -> None:
    _, run = await training(start_proxy, begin(tmp_path / "run", checkpoint))
    await run.step()
    run.log.close()
    secret = {"api_key": "k-1"}
    other = begin(tmp_path / "other", checkpoint, optimizer={"lr": 1e-3}, judge=secret)
    other.metrics.write_bytes(run.folder.metrics.read_bytes())
    closes = await opened(tab, f"sqlite:///{run.folder.sessions}", run.folder.path, other.path)
    await show(tab, "/run/run?with=other", "document.querySelector('#differences-title')")
    differences = await tab.text("section[aria-labelledby=differences-title]")
    assert "2 differences" in differences
    assert "0.001" in differences
    assert "hidden" in differences
    assert "k-1" not in await tab.evaluate("document.body.textContent")
    await tab.until("document.querySelectorAll('.chart .legend li').length > 3")
    assert "other" in await tab.text(".legend")
    assert tab.complaints == []
    await closes.aclose()


async def several(
    start_proxy: StartProxy,
    checkpoint: Path,
    tmp_path: Path,
    tab: Tab,
    others: Mapping[str, Any],
) -> AsyncExitStack:
    """Opens the page on `run`, of two steps, and on others by their names and settings."""
    folder = begin(tmp_path / "run", checkpoint, trainer={"seed": 0})
    _, run = await training(start_proxy, folder)
    await run.evaluate("before")
    await run.step()
    await run.step()
    run.log.close()
    for name, settings in others.items():
        other = begin(tmp_path / name, checkpoint, trainer=settings)
        lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
        higher = [line | {"reward/mean": line.get("reward/mean", 0.0) + 0.25} for line in lines]
        other.metrics.write_text("".join(json.dumps(line) + "\n" for line in higher))
        other.summary.write_bytes(folder.summary.read_bytes())
    more = [tmp_path / name for name in others]
    return await opened(tab, f"sqlite:///{folder.sessions}", folder.path, *more)


async def test_table_of_several_runs_is_accessible_and_fits_a_phone(
    start_proxy: StartProxy, checkpoint: Path, tmp_path: Path, tab: Tab
) -> None:
    if not AXE.is_file():
        skip_or_fail("axe-core is not installed: python -m benchmarks.install tools")
    long = "a-run-of-the-night-of-the-29th-of-november-with-" + "x" * 40
    others = {"again": {"seed": 1}, long: {"seed": 1, "steps": 9}}
    closes = await several(start_proxy, checkpoint, tmp_path, tab, others)
    await tab.call("Page.setBypassCSP", enabled=True)  # for axe, which the page would not run
    await tab.call("Page.reload")
    await tab.until("document.querySelector('header .dot.on')")
    await tab.evaluate(AXE.read_text() + "; undefined")
    await show(tab, f"/run/run?with=again,{long}", "document.querySelector('#held-out-title')")
    await tab.click("input[name=as-one]")
    await tab.until("document.querySelector('.chart .area')")
    for width in (1280, 390):
        await tab.size(width, 844, phone=width == 390)
        for scheme in ("light", "dark"):
            await tab.colours(scheme)
            assert not await violations(tab), (width, scheme)
    assert await tab.evaluate(NO_OVERFLOW)
    # All of it is seen without moving it to the side, also a difference and its interval.
    table = "document.querySelector('.held-out').parentElement"
    assert await tab.evaluate(f"{table}.scrollWidth <= {table}.clientWidth")
    assert tab.complaints == []
    await closes.aclose()


async def test_seeds_are_one_curve_with_its_spread_and_held_out_success_is_compared(
    start_proxy: StartProxy, checkpoint: Path, tmp_path: Path, tab: Tab
) -> None:
    others = {"again": {"seed": 1}, "other": {"seed": 1, "steps": 9}}
    closes = await several(start_proxy, checkpoint, tmp_path, tab, others)
    await show(tab, "/run/run?with=again,other", "document.querySelector('#held-out-title')")
    rows = "section[aria-labelledby=held-out-title] tbody tr"
    table = await tab.evaluate(f"[...document.querySelectorAll('{rows}')].map(r => r.innerText)")
    assert [row.split("\t")[0].strip() for row in table] == ["run", "again", "other"]
    assert "points" not in table[0]
    assert "+0 points" in table[1]
    assert re.search("\N{MINUS SIGN}\\d+ to [+]\\d+", table[1])
    legend = "[...document.querySelectorAll('.chart .legend bdi')].map(each => each.textContent)"
    await tab.until(f"({legend}).includes('again training')")
    assert await tab.evaluate("document.querySelector('.area')") is None
    await tab.click("input[name=as-one]")
    await tab.until("document.querySelector('.chart .area')")
    assert {"run, 2 runs training", "other training"} <= set(await tab.evaluate(legend))
    # The colours are those of the tables.
    colour = "(element, of) => getComputedStyle(element)[of]"
    third = f"({colour})(document.querySelectorAll('{rows} .swatch')[2], 'backgroundColor')"
    entries = "document.querySelectorAll('.chart .legend li, .chart .legend > *')"
    line = f"[...{entries}].find(each => each.textContent.includes('other training'))"
    assert await tab.evaluate(f"{third} === ({colour})({line}.querySelector('polyline'), 'stroke')")
    page = "import('/view/static/several.js')"
    curve = "({name: '', last: 2, metrics: ['m'], points: () => points})"
    both = f"[[[1, 0], [2, 1]], [[1, 4], [3, 9]]].map(points => {curve})"
    spread = await tab.evaluate(
        f"{page}.then(({{together}}) => together({both}))"
        ".then(one => [one.points('m'), one.spread('m')])"
    )
    assert spread == [[[1, 2]], [[1, 0, 4]]]
    # Newcombe's example: 56 of 70 and 48 of 80.
    first, second = ({"success": k / n, "interval": wilson_interval(k / n, n)} for k, n in EXAMPLE)
    shares = json.dumps([second, first])
    found = await tab.evaluate(f"{page}.then(({{difference}}) => difference(...{shares}))")
    assert found == pytest.approx([0.2, 0.0524, 0.3339], abs=1e-4)
    await tab.size(390, 844, phone=True)
    assert await tab.evaluate(NO_OVERFLOW)
    assert tab.complaints == []
    await closes.aclose()


async def test_table_of_several_runs_has_their_last_evaluations_as_they_come(
    start_proxy: StartProxy, checkpoint: Path, tmp_path: Path, tab: Tab
) -> None:
    folder = begin(tmp_path / "run", checkpoint)
    _, run = await training(start_proxy, folder)
    await run.evaluate("before")
    await run.step()
    run.log.close()
    other = begin(tmp_path / "other", checkpoint)
    summary = json.loads(folder.summary.read_text())
    (before,) = summary["eval"].values()

    def evaluated(name: str, success: float) -> None:
        last = before | {"success": success, "interval": [success - 0.1, success + 0.1]}
        more = {"eval": {"before": before, name: last}}
        written = other.summary.with_name("new")
        written.write_text(json.dumps(summary | more))
        written.replace(other.summary)

    evaluated("after 1", 0.75)
    closes = await opened(tab, f"sqlite:///{folder.sessions}", folder.path, other.path)
    await show(tab, "/run/run?with=other", "document.querySelector('#held-out-title')")
    row = "document.querySelector('section[aria-labelledby=held-out-title] tbody tr:last-child')"
    assert "75 %" in await tab.evaluate(f"{row}.innerText")
    evaluated("after 2", 0.5)
    await tab.until(f"{row}.innerText.includes('50 %')")
    assert "after 2" in await tab.evaluate(f"{row}.innerText")
    # The server ends in the second in which the last evaluation does.
    evaluated("after 3", 0.25)
    await closes.aclose()
    await tab.until(f"{row}.innerText.includes('25 %')")


async def test_hostile_content_of_a_run_is_shown_as_text(
    start_proxy: StartProxy, checkpoint: Path, tmp_path: Path, tab: Tab
) -> None:
    settings = {"data": {HOSTILE: HOSTILE, "long": "x" * 100_000}}
    folder = begin(tmp_path / "run", checkpoint, **settings)
    proxy, run = await training(start_proxy, folder, HOSTILE, "x" * 10_000)
    run.agent.question = HOSTILE.replace("\x00", "") + "<b>" * 1_000
    run.error = HOSTILE + "y" * 1_000_000
    await run.evaluate("before")
    await run.step(**{f"own/{HOSTILE}": 1.0})
    await run.evaluate(HOSTILE[:60])
    run.log.close()
    await enter(tab, proxy)
    await show(tab, "/run/run", "document.querySelectorAll('.groups tbody tr').length === 2")
    await tab.click(".others summary")
    await tab.until("document.querySelector('.others .chart')")
    assert "<script>" in await tab.text(".groups")
    await tab.evaluate("document.querySelector('.groups tbody a').click()")
    await tab.until("document.querySelector('.aligned .cell')")
    await show(tab, "/trials/run?errors=yes", "document.querySelector('.run-trials td.words bdi')")
    await show(tab, "/compare/run", "document.querySelector('.aligned thead th')")
    assert await tab.evaluate(NO_OVERFLOW)
    assert await tab.evaluate("window.hacked") is None
    assert await tab.evaluate("document.querySelectorAll('main script, main img').length") == 0
    assert tab.complaints == []
