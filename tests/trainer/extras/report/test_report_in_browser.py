"""The report in a real Chromium, of a run that the trainer's own code wrote."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.needs import needs, skip_or_fail
from tests.proxy.conftest import StartProxy
from tests.proxy.extras.view.chromium import MISSING, Tab
from tests.proxy.extras.view.recording import HOSTILE
from tests.proxy.extras.view.test_page import AXE, NO_OVERFLOW, violations
from tests.trainer.extras.report.written import write_run
from tests.trainer.view.recorded_run import RecordedTraining, begin, training, whole
from trainer.extras.report import write_report
from trainer.run.metrics import Transcript

pytestmark = [needs(MISSING), pytest.mark.programs]
COMPLETE = "document.querySelector('.configuration')"


async def show_report(tab: Tab, run: RecordedTraining) -> Sequence[Transcript]:
    """Writes the report and opens it as a file, without a server. Returns its transcripts."""
    report = await asyncio.to_thread(write_report, run.folder)
    await tab.open(report.page.as_uri())
    await tab.until(COMPLETE)
    return report.transcripts


@pytest.fixture
async def run(start_proxy: StartProxy, checkpoint: Path, tmp_path: Path) -> RecordedTraining:
    settings = {"logging": {"report_trials": 2}}
    _, run = await training(start_proxy, begin(tmp_path / "run", checkpoint, **settings))
    await whole(run)
    return run


async def test_report_is_accessible_and_fits_a_phone(run: RecordedTraining, tab: Tab) -> None:
    if not AXE.is_file():
        skip_or_fail("axe-core is not installed: python -m benchmarks.install tools")
    await tab.call("Page.setBypassCSP", enabled=True)  # for axe, which the report would not run
    await show_report(tab, run)
    await tab.evaluate(AXE.read_text() + "; undefined")
    await tab.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
    await tab.until("document.querySelectorAll('.chart').length > 12")
    for scheme in ("light", "dark"):
        await tab.colours(scheme)
        assert await violations(tab) == []
    for width in (360, 1280):
        await tab.size(width, 800, phone=width == 360)
        assert await tab.evaluate(NO_OVERFLOW), f"the report is wider than {width} pixels"
    assert tab.complaints == []


async def test_curves_have_titles_units_ticks_and_intervals(
    run: RecordedTraining, tab: Tab
) -> None:
    await show_report(tab, run)
    texts = await tab.evaluate(
        "[...document.querySelector('.chart svg').querySelectorAll('text')].map(t => t.textContent)"
    )
    assert texts[:3] == ["0 %", "50 %", "100 %"]
    assert texts[-6:] == ["0", "1", "2", "3", "step", "share of trials"]
    assert await tab.evaluate("document.querySelectorAll('.chart .interval').length") == 4
    await tab.evaluate("document.querySelector('.charts').focus()")
    await tab.press("ArrowLeft", 37)
    await tab.until("document.querySelector('.chart svg').ariaLabel.includes('at step 2')")
    assert tab.complaints == []


async def test_curves_of_several_policies_are_in_the_panels_of_their_metrics(
    tab: Tab, tmp_path: Path
) -> None:
    values = {
        "reward/mean": 0.5,
        "policies/planner/reward/mean": 0.4,
        "policies/coder/reward/mean": 0.6,
        "policies/coder/actor/policy_loss": 0.1,
        "policies/coder/actor/other": 0.1,
    }
    folder = write_run(tmp_path / "run", metrics=[{"step": n} | values for n in (1, 2)])
    report = await asyncio.to_thread(write_report, folder)
    await tab.open(report.page.as_uri())
    await tab.until(COMPLETE)
    await tab.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
    await tab.until("document.querySelectorAll('.chart').length === 3")
    names = await tab.evaluate(
        "[...document.querySelectorAll('.chart')].map(chart =>"
        " [...chart.querySelectorAll('.legend bdi')].map(name => name.textContent))"
    )
    assert names == [["training", "coder training", "planner training"], ["coder policy"], []]
    assert tab.complaints == []


async def test_pairs_show_probabilities_and_advantages_by_mouse_and_keyboard(
    run: RecordedTraining, tab: Tab
) -> None:
    transcripts = await show_report(tab, run)
    assert len(transcripts) == 6
    assert all("[assistant, sampled]\nLet me multiply" in each.text for each in transcripts)
    assert any("4 + 7 = 11.<|im_end|>" in each.text for each in transcripts)
    titles = await tab.evaluate(
        "[...document.querySelectorAll('.pair h3')].map(each => each.textContent)"
    )
    assert len(titles) == 3
    assert titles[-1].startswith("Training, step 3, ")
    await tab.evaluate("document.querySelector('.pair .tokens').focus()")
    first = await tab.text(".details")
    await tab.press("ArrowRight", 39)
    await tab.until(f"document.querySelector('.details').innerText !== {first!r}")
    assert re.search(r"probability\n+\d", await tab.text(".details"))
    assert "advantage" not in await tab.text(".details")
    await tab.press("Escape", 27)
    await tab.until("!document.querySelector('.details')")
    coloured = ".pair:last-child .token:is(.up0, .up1, .up2, .down0, .down1, .down2)"
    box = await tab.evaluate(
        f"""(() => {{ const found = document.querySelector('{coloured}');
        found.scrollIntoView({{block: 'center'}}); const box = found.getBoundingClientRect();
        return [box.x + box.width / 2, box.y + box.height / 2]; }})()"""
    )
    await tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
    await tab.until("document.querySelector('.details')")
    shown = await tab.text(".details")
    assert re.search(r"advantage\n+-?\d", shown)
    assert re.search(r"trainer.s probability\n+\d", shown)
    assert tab.complaints == []


async def test_print_has_every_section_on_pages_of_its_own_colours(
    run: RecordedTraining, tab: Tab
) -> None:
    await show_report(tab, run)
    await tab.colours("dark")
    printed = await tab.call(
        "Page.printToPDF",
        printBackground=True,
        generateTaggedPDF=True,
        generateDocumentOutline=True,
        paperWidth=8.27,
        paperHeight=11.69,
    )
    pdf = base64.b64decode(printed["data"])
    pages = len(re.findall(rb"/Type /Page\b(?!s)", pdf))
    outline = [found.decode() for found in re.findall(rb"/Title \(([^)]*)\)", pdf)]
    sections = ["Evaluation on held-out tasks", "Curves", "What went wrong", "Transcripts"]
    assert [each for each in outline if each in sections] == sections
    assert sum(bool(re.search("(failed|solved) before|^Training, step", t)) for t in outline) == 3
    assert 5 <= pages <= 15  # one for each pair at least
    # What was folded on the screen is open.
    assert await tab.evaluate("document.querySelector('.configuration details').open")
    assert await tab.evaluate("document.querySelectorAll('.chart').length") > 6
    assert tab.complaints == []


async def test_hostile_content_is_text_in_the_report(
    start_proxy: StartProxy, checkpoint: Path, tmp_path: Path, tab: Tab
) -> None:
    nasty = HOSTILE.replace("\x00", "") + "</script><script>window.hacked = 9</script>"
    folder = begin(tmp_path / "run", checkpoint, data={HOSTILE: HOSTILE})
    _, run = await training(start_proxy, folder, HOSTILE, "x" * 10_000)
    run.agent.question = nasty + "<b>" * 5_000
    run.error = HOSTILE + "y" * 10_000_000
    await run.evaluate("before")
    await run.step(**{f"own/{HOSTILE}": 1.0})
    await run.evaluate("after")
    run.log.progress.say(f"warning: {nasty}")
    run.log.finish("done")
    run.log.close()
    await tab.size(360, 800, phone=True)
    await show_report(tab, run)
    assert run.folder.report.stat().st_size < 1_000_000
    await tab.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
    await tab.until(
        "[...document.querySelectorAll('.chart')].some(e => e.innerText.includes('own/'))"
    )
    text = await tab.text("#report")
    assert "</script><script>window.hacked = 9</script>" in text
    assert "␛[31mred␛[0m" in text
    assert "⟨U+202E⟩gnp.exe" in text
    assert "more characters are left out" in text
    assert await tab.evaluate(NO_OVERFLOW)
    assert await tab.evaluate("window.hacked") is None
    assert await tab.evaluate("document.querySelectorAll('main script, main img, a').length") == 0
    assert tab.complaints == []


async def test_nothing_but_its_own_script_runs_and_nothing_is_fetched(
    run: RecordedTraining, tab: Tab
) -> None:
    await show_report(tab, run)
    await tab.evaluate(
        "document.body.append(Object.assign(document.createElement('script'),"
        " {async: false}), Object.assign(document.createElement('img'), {src: 'data:,x'}))"
    )
    refused = await tab.evaluate("fetch('data:,x').then(() => 'fetched', error => error.name)")
    assert refused == "TypeError"
    assert tab.complaints
    assert all("Content Security Policy" in each for each in tab.complaints), tab.complaints
