"""Takes a picture of each view of a run: python -m tests.trainer.view.screenshots RUN FOLDER

The pictures of docs/view.md. RUN is the folder of a run of the quickstart; its
report is written again.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from urllib.parse import quote

from aiohttp import web

from proxy.config import ListenConfig
from proxy.extras.view.access import new_link
from proxy.extras.view.command import build_view
from proxy.extras.view.run_folder import RecordedRun
from proxy.extras.view.runs import RecordedRuns
from proxy.http.server import app_runner
from proxy.rendering.tokenizer import load_tokenizer
from proxy.store import open_store
from tests.proxy.extras.view.chromium import Tab, chromium
from tests.proxy.extras.view.pictures import take, take_all
from trainer.extras.report import Report, write_report
from trainer.run.folder import RunFolder

ALIGNED = "document.querySelector('.aligned .cell')"
COLOURED = "document.querySelector('.flow .up0, .flow .up1, .flow .down0, .flow .down1')"
REPORT_HEIGHT = 2600
"""Pixels down to the verifier's output of the first pair."""


def views(run: str, step: int, group: str, trial: str, turn: int = 1) -> dict[str, tuple[str, str]]:
    """Each view's place, and what is on the page once it is complete."""
    tokens = f"/tokens/{quote(trial, safe='')}?turn={turn}"
    return {
        "ended": (f"/trial/{quote(trial, safe='')}", "document.querySelector('.of-run')"),
        "run": (f"/run/{run}?step={step}", "document.querySelector('.groups tbody tr')"),
        "group": (f"/group/{run}?step={step}&group={quote(group)}", ALIGNED),
        "trials": (f"/trials/{run}?kind=train", "document.querySelector('.run-trials tbody tr')"),
        "compare": (f"/compare/{run}", ALIGNED),
        "advantages": (f"{tokens}&colour=advantage", COLOURED),
        "trained": (f"{tokens}&as=table", "document.querySelector('.token-table .p')"),
    }


async def main(path: Path, folder: Path) -> None:
    runs = RecordedRuns([path])
    (run,) = runs.values()
    assert run.model is not None
    store = await open_store(f"sqlite:///{run.sessions}", create=False)
    runner = app_runner(build_view(ListenConfig(), store, load_tokenizer(run.model), runs))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/#link={await new_link(store.browser)}"
    shown = views(run.name, *_worth_seeing(run))
    with tempfile.TemporaryDirectory() as profile:
        async with chromium(Path(profile)) as browser:
            tab = await browser.tab()
            await tab.open(url)
            await tab.until("document.querySelector('header .dot.on')")
            await take_all(tab, shown, folder)
            report = await asyncio.to_thread(write_report, RunFolder.open(path))
            await _take_report(await browser.tab(), report, folder)
    await runner.cleanup()
    await store.close()


def _worth_seeing(run: RecordedRun) -> tuple[int, str, str]:
    """A step, one of its groups whose rewards differ, and a trial of it with a reward."""
    for step in range(1, 1000):
        trials = [each for each in run.step(step)["trials"] if each["kind"] == "train"]
        for trial in trials:
            rewards = [each["reward"] for each in trials if each["group"] == trial["group"]]
            if trial["reward"] and len(set(rewards)) > 1:
                return step, str(trial["group"]), str(trial["trial_id"])
    sys.exit(f"{run.path}: no group of this run has different rewards")


async def _take_report(tab: Tab, report: Report, folder: Path) -> None:
    """The report on a screen down to its first pair, and its beginning on a phone."""
    await tab.open(report.page.as_uri())
    await tab.until("document.querySelector('.configuration')")
    await tab.size(1280, REPORT_HEIGHT)
    await take(tab, folder / "report.png")
    await tab.size(390, 844, phone=True)
    await take(tab, folder / "report-phone.png")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
