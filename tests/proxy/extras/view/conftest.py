"""A real browser with the page of a real proxy."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.proxy.conftest import (  # noqa: F401
    ADMIN_KEY,
    RunningProxy,
    checkpoint,
    proxy,
    rendering,
    start_proxy,
)
from tests.proxy.extras.view.chromium import Chromium, Tab, chromium


@pytest.fixture
async def browser(tmp_path: Path) -> AsyncIterator[Chromium]:
    async with chromium(tmp_path / "profile") as running:
        yield running


@pytest.fixture
async def tab(browser: Chromium) -> Tab:
    return await browser.tab()


async def enter(tab: Tab, proxy: RunningProxy, place: str = "") -> None:  # noqa: F811
    """Logs in with the admin key, by the form, and goes to a place (the part after `#`)."""
    await tab.open(f"{proxy.url}/{place and '#' + place}")
    await tab.until("document.querySelector('#secret')")
    await tab.evaluate(f"document.querySelector('#secret').value = {ADMIN_KEY!r}")
    await tab.click("form button")
    await tab.until("document.querySelector('header .dot.on')")
    # The attempt to read the state without a cookie.
    assert all("401" in each for each in tab.complaints), tab.complaints
    tab.complaints.clear()


async def show(tab: Tab, place: str, ready: str) -> None:
    """Goes to a place, and waits until it is complete (`ready`) and drawn."""
    await tab.evaluate(f"location.hash = '#/now?'; location.hash = '#{place}'")
    await tab.until(ready)
    await tab.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done, 100)))")
