"""A page that stays open: other readers, another store, requests that fail, steps that go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from proxy.client import ProxyClient
from tests.needs import needs
from tests.proxy.conftest import RunningProxy, StartProxy
from tests.proxy.extras.view.chromium import MISSING, Tab
from tests.proxy.extras.view.conftest import enter, show
from tests.proxy.extras.view.recording import call, user, work

pytestmark = [needs(MISSING), pytest.mark.programs]
FAILS_ONCE = """(() => {
  const real = window.fetch;
  let failed = false;
  window.fetch = (url, options) => {
    if (failed || !String(url).startsWith('/view/turns')) return real(url, options);
    failed = true;
    return Promise.reject(new TypeError('Failed to fetch'));
  };
})()"""


async def test_who_logs_in_next_sees_nothing_of_the_reader_before(
    start_proxy: StartProxy, tmp_path: Path, tab: Tab
) -> None:
    key = tmp_path / "ann.key"
    key.write_text("ann-key-0123456789-abcdefgh")
    key.chmod(0o600)
    proxy = await start_proxy(people={"ann": key})
    await work(proxy, await proxy.session(trial_id="of-bob"), "Hi.", turns=1)
    await enter(tab, proxy)
    await tab.until("document.querySelector('main').innerText.includes('of-bob')")
    out = "[...document.querySelectorAll('header button')].find(b => b.innerText === 'Log out')"
    await tab.evaluate(f"{out}.click()")
    await tab.until("document.querySelector('#secret')")
    await tab.evaluate(f"document.querySelector('#secret').value = {key.read_text()!r}")
    await tab.click("form button")
    await tab.until("document.querySelector('header .dot.on')")
    async with ProxyClient(proxy.url, key.read_text()) as ann:
        await work(proxy, await ann.create_session("ann/one"), "Hi.", turns=1)
    await tab.until("document.querySelector('main').innerText.includes('ann/one')")
    assert "of-bob" not in await tab.text("main")


async def test_long_text_is_counted_in_characters_and_asked_for_again(
    proxy: RunningProxy, tab: Tab
) -> None:
    numbers = "".join(f"<{number:05d}>" for number in range(2000))
    session = await proxy.session(trial_id="long")
    await call(proxy, session, [user("😀" * 2000 + numbers)])
    await enter(tab, proxy)
    await tab.evaluate(FAILS_ONCE)
    await show(tab, "/trial/long?turn=0", "document.querySelector('.message.user .text .more')")
    assert await tab.text(".message.user .text .more") == "8,000 more characters"
    await tab.click(".message.user .text .more")
    await tab.until("!document.querySelector('.message.user .text .more')")
    shown = await tab.text(".message.user .text")
    assert shown == "😀" * 2000 + numbers


def _line(step: int, task: int, kind: str, reward: float | None, **more: Any) -> str:
    trial = {"step": step, "kind": kind, "trial_id": f"{kind}-{step}-{task}", "group": None}
    more = {"evaluation": None, "error": None, "source": None, "agent": None, **more}
    ended = {"status": "failed" if reward is None else "done", "turns": 1, "sampled_tokens": 3}
    return json.dumps(
        {**trial, "task_id": f"t{task}", "reward": reward, "seconds": 1.0, **ended, **more}
    )


async def test_run_shows_every_curve_what_was_not_judged_and_a_step_that_goes_on(
    start_proxy: StartProxy, tmp_path: Path, tab: Tab
) -> None:
    run = tmp_path / "myrun"
    run.mkdir()
    (run / "config.yaml").write_text("trainer: {steps: 100}\n")
    found = {"success": 0.5, "interval": [0.1, 0.9], "reward": 0.5}
    evals = {"before": {**found, "step": 0}, "after": {**found, "step": 30}}
    (run / "summary.json").write_text(json.dumps({"status": "done", "steps": 30, "eval": evals}))
    metrics: list[dict[str, Any]] = [{"step": 0, "time": 1.0, "eval/source/code": 0.25}]
    more = {"reward/mean": 0.5, "rollout/trials": 8}
    metrics += [{"step": step, "time": 1.0 + step, **more} for step in range(1, 31)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in metrics))
    lines = [_line(0, task, "eval", 1.0, evaluation="before") for task in range(4)]
    lines += [_line(30, 100 + task, "train", 1.0) for task in range(8)]
    after = (1.0, None, None, 0.0)
    lines += [_line(30, n, "eval", reward, evaluation="after") for n, reward in enumerate(after)]
    (run / "trials.jsonl").write_text("".join(line + "\n" for line in lines))
    proxy = await start_proxy(run=run)
    await enter(tab, proxy)
    await show(tab, "/run/myrun", "document.querySelector('.charts figure')")
    await tab.evaluate("document.querySelectorAll('details.others').forEach(e => e.open = true)")
    named = "[...document.querySelectorAll('.charts figcaption')].some(e => e.innerText.includes"
    await tab.until(f"{named}('eval/source/code'))")
    await show(tab, "/compare/myrun?a=before&b=after", "document.querySelector('main .tasks')")
    said = await tab.text("main")
    assert "4 tasks: 0 better, 1 worse, 1 with the same reward, 2 not judged in both." in said
    await show(tab, "/run/myrun?step=31", "document.querySelector('#step p.quiet')")
    with (run / "trials.jsonl").open("a") as file:
        file.write("".join(_line(31, task, "train", 1.0) + "\n" for task in range(8)))
    await tab.until("document.querySelectorAll('#step tbody tr').length === 8")
