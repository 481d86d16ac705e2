"""The sessions of a second run on one page: they are found in that run's own store."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from pydantic import SecretStr

from proxy.config import ListenConfig
from proxy.extras.view.access import new_link
from proxy.extras.view.command import build_view
from proxy.extras.view.runs import RecordedRuns
from proxy.http.server import app_runner
from proxy.rendering.tokenizer import load_tokenizer
from proxy.store import open_store
from tests.needs import needs
from tests.proxy.conftest import ADMIN_KEY, StartProxy
from tests.proxy.extras.view.chromium import MISSING, Tab
from tests.proxy.extras.view.conftest import show
from tests.proxy.extras.view.test_api import Reader
from tests.trainer.view.recorded_run import begin, training

QUESTIONS = {"first": "What do four lamps cost?", "second": "What do nine chairs cost?"}
Page = tuple[Reader, str]


@pytest.fixture
async def page(start_proxy: StartProxy, checkpoint: Path, tmp_path: Path) -> AsyncIterator[Page]:
    """Shows two runs whose trials have the same names, and a third one with another model; and the
    page's link."""
    another_model = tmp_path / "another-model"
    shutil.copytree(checkpoint, another_model)
    for name, question in QUESTIONS.items():
        _, run = await training(start_proxy, begin(tmp_path / name, checkpoint))
        run.agent.question = question
        await run.step()
        run.log.close()
    shutil.copytree(tmp_path / "second", tmp_path / "third")
    config = (tmp_path / "third" / "config.yaml").read_text()
    (tmp_path / "third" / "config.yaml").write_text(
        config.replace(str(checkpoint), str(another_model))
    )
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.yaml").write_text("{}")
    store = await open_store(f"sqlite:///{tmp_path / 'first' / 'sessions.db'}", create=False)
    runs = RecordedRuns([tmp_path / name for name in ("first", "second", "third", "empty")])
    config_of_page = ListenConfig(admin_key=SecretStr(ADMIN_KEY))
    runner = app_runner(build_view(config_of_page, store, load_tokenizer(checkpoint), runs))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with aiohttp.ClientSession() as http:
        yield Reader(http, url), f"{url}/#link={await new_link(store.browser)}"
    await runner.cleanup()
    await store.close()


async def test_session_of_another_run_is_read_from_its_own_store(page: Page) -> None:
    reader, _ = page

    async def question(**run: str) -> str:
        asked = {"session": "lamps-1", **run}
        assert (await reader.get("session", **asked))["turns"] == 2
        assert len((await reader.get("heads", **asked))["turns"]) == 2
        assert (await reader.get("fork", **asked, turn=1))["cause"] is None
        (turn,) = (await reader.get("turns", **asked, turns="0"))["turns"]
        piece = await reader.get("text", **asked, turn=0, place="1.text", **{"from": 0})
        tokens: dict[str, Any] = await reader.get("tokens", **asked, turn=1, count=4000)
        assert tokens["trained"]["step"] == 1
        if tokens["texts"] is not None:
            assert piece["text"] in "".join(tokens["texts"])
        assert (tokens["texts"] is None) == (run == {"run": "third"})
        assert turn["messages"][1]["text"] == piece["text"]
        return str(piece["text"])

    assert await question() == QUESTIONS["first"]
    for run, expected in (("first", "first"), ("second", "second"), ("third", "second")):
        assert await question(run=run) == QUESTIONS[expected]
    for run, reason in (("other", "there is no run"), ("empty", "no sessions of its own")):
        status, refused = await reader.ask("heads", session="lamps-1", run=run)
        assert status == 404
        assert reason in refused["error"]["message"]


@pytest.mark.programs
@needs(MISSING)
async def test_links_of_another_run_lead_to_its_own_sessions(page: Page, tab: Tab) -> None:
    _, link = page
    await tab.open(link)
    await tab.until("document.querySelector('header .dot.on')")
    asked = "document.querySelector('.conversation')?.innerText.includes('{}')"
    for name, question in QUESTIONS.items():
        await show(tab, f"/trials/{name}?status=done", "document.querySelector('.run-trials a.id')")
        await tab.click(".run-trials a.id")
        await tab.until(asked.format(question))
        assert (await tab.evaluate("location.hash")).endswith(f"?run={name}")
        await tab.click(".turn h2 a.quiet")
        await tab.until("document.querySelector('.flow .token')")
        await tab.click("h1 a")
        await tab.until(asked.format(question))
    group = "/group/second?step=1&group=g0-0"
    await show(tab, group, "document.querySelector('.aligned .cell')")
    shown = await tab.evaluate("document.querySelector('main').textContent")
    assert QUESTIONS["second"] in shown
    await tab.click(".aligned thead a.id")
    await tab.until(asked.format(QUESTIONS["second"]))
    # The same session in two stores: the page of one does not stay when the other is opened.
    await tab.evaluate("location.hash = '#/trial/lamps-1'")
    await tab.until(asked.format(QUESTIONS["first"]))
    assert tab.complaints == []
