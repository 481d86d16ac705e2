"""The views of a run in a real Chromium, on a run that the trainer's code wrote."""

from __future__ import annotations

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
from proxy.store import open_store
from tests.needs import needs, skip_or_fail
from tests.proxy.conftest import StartProxy
from tests.proxy.extras.view.chromium import MISSING, Tab
from tests.proxy.extras.view.conftest import enter, show
from tests.proxy.extras.view.recording import HOSTILE, call, user
from tests.proxy.extras.view.test_page import AXE, NO_OVERFLOW, violations
from tests.trainer.view.recorded_run import begin, training, whole, write_log
from tests.trainer.view.screenshots import views

pytestmark = [needs(MISSING), pytest.mark.programs]


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
    store = await open_store(f"sqlite:///{run.folder.sessions}", create=False)
    runs = RecordedRuns([run.folder.path, other.path])
    runner = app_runner(build_view(ListenConfig(), store, None, runs))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    link = await new_link(store.browser)
    await tab.open(f"http://127.0.0.1:{runner.addresses[0][1]}/#link={link}")
    await tab.until("document.querySelector('header .dot.on')")
    await show(tab, "/run/run?with=other", "document.querySelector('#differences-title')")
    differences = await tab.text("section[aria-labelledby=differences-title]")
    assert "2 differences" in differences
    assert "0.001" in differences
    assert "hidden" in differences
    assert "k-1" not in await tab.evaluate("document.body.textContent")
    await tab.until("document.querySelectorAll('.chart .legend li').length > 3")
    assert "other" in await tab.text(".legend")
    assert tab.complaints == []
    await runner.cleanup()
    await store.close()


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
