"""The page in a real Chromium, on sessions of a real proxy."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from proxy.extras.view.access import new_key, new_link
from proxy.store import open_store
from tests.needs import needs, skip_or_fail
from tests.proxy.conftest import RunningProxy, StartProxy
from tests.proxy.extras.view.chromium import MISSING, Chromium, Tab
from tests.proxy.extras.view.conftest import enter, show
from tests.proxy.extras.view.recording import HOSTILE, call, record, record_day, user, work
from tests.proxy.extras.view.screenshots import VIEWS

pytestmark = [needs(MISSING), pytest.mark.programs]
AXE = Path(__file__).parents[4] / ".cache/tools/node_modules/axe-core/axe.min.js"
NO_OVERFLOW = "document.documentElement.scrollWidth <= innerWidth"


async def test_every_view_is_accessible_and_fits_a_phone(proxy: RunningProxy, tab: Tab) -> None:
    if not AXE.is_file():
        skip_or_fail("axe-core is not installed: python -m benchmarks.install tools")
    await record(proxy)
    await record_day(proxy)
    await enter(tab, proxy)
    await tab.call("Page.setBypassCSP", enabled=True)  # for axe, which the page would not run
    await tab.call("Page.reload")
    await tab.until("document.querySelector('header .dot.on')")
    await tab.evaluate(AXE.read_text() + "; undefined")
    found = {}
    for scheme in ("light", "dark"):
        await tab.colours(scheme)
        for name, (place, ready) in VIEWS.items():
            await show(tab, place, ready.replace("> 3", "> 0"))
            found[f"{name}, {scheme}"] = await violations(tab)
    assert not any(found.values()), {name: wrong for name, wrong in found.items() if wrong}
    await tab.size(390, 844, phone=True)
    for name, (place, ready) in VIEWS.items():
        await show(tab, place, ready.replace("> 3", "> 0"))
        assert await tab.evaluate(NO_OVERFLOW), f"{name} is wider than a phone"
    assert tab.complaints == []


async def violations(tab: Tab) -> list[str]:
    found = await tab.evaluate(
        "axe.run().then(r => r.violations.map(v => v.id + ': ' + v.nodes.map(n => n.html + "
        "(n.any[0]?.message ?? '')).slice(0, 3).join(' | ')))"
    )
    assert isinstance(found, list)
    return found


async def test_hostile_content_is_shown_as_text_in_every_view(
    proxy: RunningProxy, tab: Tab
) -> None:
    name = "evil/" + "a" * 200
    metadata = {"<img src=x onerror=window.hacked=7>": HOSTILE, "long": "x" * 100_000}
    session = await proxy.session(trial_id=name, metadata=metadata)
    proxy.answers(HOSTILE.replace("\x00", "") * 3)
    messages = [user(HOSTILE), {"role": "assistant", "content": "<script>hacked=1</script>"}]
    call_of = {"name": "<b>tool</b>", "arguments": json.dumps({HOSTILE: HOSTILE})}
    messages.append(
        {
            "role": "assistant",
            "tool_calls": [{"id": HOSTILE, "type": "function", "function": call_of}],
        }
    )
    messages.append({"role": "tool", "tool_call_id": HOSTILE, "content": HOSTILE * 50})
    await call(proxy, session, messages)
    await call(proxy, session, [*messages[:1], user(HOSTILE + " again")])
    # A lone surrogate, which JSON can hold.
    body = rb'{"model": "m", "messages": [{"role": "user", "content": "\ud800 \u202e"}]}'
    await proxy.post(session, "chat/completions", body)
    # A line of a million characters.
    await proxy.post(session, "chat/completions", {"model": "m", "messages": "<i>" * 1000})
    long = {"model": "m", "messages": [user("<b>" * 7_000)]}
    await proxy.post(session, "chat/completions", long)
    await enter(tab, proxy)
    quoted = name.replace("/", "%2F")
    ready = "document.querySelectorAll('.message .text').length > 3"
    await show(tab, f"/trial/{quoted}?turn=0", ready)
    assert "<script>window.hacked = 1</script>" in await tab.text(".conversation")
    assert "␛[31mred␛[0m" in await tab.text(".conversation")
    assert "⟨U+202E⟩gnp.exe" in await tab.text(".conversation")
    assert "⟨U+E0041⟩tagged" in await tab.text(".conversation")
    await show(tab, f"/trial/{quoted}?turn=1", "document.querySelector('.why figure')")
    await show(tab, f"/tokens/{quoted}?turn=0", "document.querySelector('.flow .token')")
    await show(tab, f"/tokens/{quoted}?turn=0&as=table", "document.querySelector('svg.p')")
    await show(tab, "/sessions", "document.querySelector('.sessions tbody tr')")
    await show(tab, "/now", "document.querySelector('.errors li')")
    assert await tab.evaluate(NO_OVERFLOW)
    assert await tab.evaluate("window.hacked") is None
    assert await tab.evaluate("document.querySelectorAll('main script, main img').length") == 0
    assert tab.complaints == []


async def test_details_of_a_token_have_its_alternatives(
    proxy: RunningProxy, tab: Tab, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await proxy.session(trial_id="chosen", sampling={"alternatives": 3})
    await work(proxy, session, "Hello.", turns=1)
    _, (turn,) = await proxy.record(session)
    assert turn.alternatives is not None
    monkeypatch.setattr("proxy.extras.view.turn_tokens._text", lambda ids, _: HOSTILE)
    await enter(tab, proxy)
    items = "[...document.querySelectorAll('ol.alternatives li')]"
    for at, row in enumerate(turn.alternatives["id"].tolist()):
        token = int(turn.sampled_ids[at])
        place = f"/tokens/chosen?turn=0&at={turn.prompt_tokens + at}"
        await show(tab, place, "document.querySelector('ol.alternatives li')")
        told = await tab.evaluate(f"{items}.map(each => each.querySelector('small').innerText)")
        expected = [*row, *([] if token in row else [token])]
        assert told == [f"id {each}" + " sampled" * (each == token) for each in expected]
    assert "<script>window.hacked = 1</script>" in await tab.text("ol.alternatives li code")
    assert "⟨U+202E⟩gnp.exe" in await tab.text("ol.alternatives li code")
    await show(tab, "/tokens/chosen?turn=0&at=0", "document.querySelector('p.alternatives')")
    assert await tab.evaluate("window.hacked") is None
    assert "> 95 %" in await tab.text("[aria-label='Colours: probability']")
    assert await tab.evaluate(NO_OVERFLOW)
    assert tab.complaints == []


async def test_calls_appear_while_they_come_in_and_keys_move_between_turns(
    proxy: RunningProxy, tab: Tab
) -> None:
    session = await proxy.session(trial_id="live")
    await enter(tab, proxy, "/trial/live")
    await tab.until("document.body.innerText.includes('No call yet')")
    messages = await work(proxy, session, "Hello.", turns=2)
    await tab.until("document.querySelectorAll('.tree li').length === 2")
    await tab.until("document.querySelectorAll('.message.sampled').length === 2")
    await tab.evaluate("document.querySelector('.tree li:last-child a').focus()")
    await tab.press("ArrowUp", 38)
    await tab.until("document.activeElement.textContent.includes('#0')")
    await tab.press("Enter", 13)
    await tab.evaluate("document.activeElement.click()")
    await tab.until("location.hash === '#/trial/live?turn=0'")
    await tab.until("document.querySelectorAll('.message.sampled').length === 1")
    await tab.evaluate("location.hash = '#/now'")
    await tab.until("document.querySelectorAll('.view-now .id').length === 1")
    await call(proxy, session, [*messages, user("Go on.")])
    await tab.until("document.querySelector('.view-now .id').textContent === 'live #2'")
    await show(tab, "/tokens/live?turn=0", "document.querySelector('.token.chosen')")
    await tab.evaluate("document.querySelector('.flow').focus()")
    before = await tab.text(".details dd")
    await tab.press("ArrowRight", 39)
    await tab.until(f"document.querySelector('.details dd').innerText !== {before!r}")
    assert int(await tab.text(".details dd")) == int(before) + 1
    assert tab.complaints == []


async def test_an_answer_that_breaks_off_is_none(proxy: RunningProxy, tab: Tab) -> None:
    """The page asks again while it reads an answer, and gives the first one up."""
    await enter(tab, proxy)
    asked = """(async () => {
        const { get } = await import("/view/static/api.js");
        const broken = new ReadableStream({ start: (stream) => stream.error(new Error("cut")) });
        const before = window.fetch;
        window.fetch = async () => new Response(broken);
        try { return JSON.stringify(await get("session", {})); }
        catch (error) { return error.name; }
        finally { window.fetch = before; }
    })()"""
    assert "Error" in await tab.evaluate(asked)


async def test_page_that_is_left_or_hidden_holds_no_stream(
    proxy: RunningProxy, tab: Tab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A browser has six connections to a server, and keeps pages that were left for a while."""
    monkeypatch.setattr("proxy.extras.view.live.MAX_READERS", 2)
    await enter(tab, proxy)
    for _ in range(4):
        await tab.open("about:blank")
        await tab.open(f"{proxy.url}/#/now")
        await tab.until("document.querySelector('header .dot.on')")
    session = await proxy.session(trial_id="seen")
    for number in range(4):
        hidden = "Object.defineProperty(document, 'hidden', { value: %s, configurable: true });"
        changed = "window.dispatchEvent(new Event('visibilitychange'))"
        await tab.evaluate(hidden % "true" + changed)
        await work(proxy, session, f"Hello {number}.", turns=1)
        await tab.evaluate(hidden % "false" + changed)
        await tab.until(f"document.querySelector('.view-now .id').textContent === 'seen #{number}'")
    assert tab.complaints == []


async def test_link_opens_the_page_once_and_a_revoked_key_closes_it(
    start_proxy: StartProxy, browser: Chromium, tmp_path: Path
) -> None:
    store = await open_store(f"sqlite:///{tmp_path}/links.db")
    proxy = await start_proxy(store=store)
    link, key = await new_link(store.browser), await new_key(store.browser, "ana")
    one, two, three = [await browser.tab() for _ in range(3)]
    await one.open(f"{proxy.url}/#link={link}")
    await one.until("document.querySelector('header .dot.on')")
    assert await one.evaluate("location.hash") == "#/now"
    assert await one.evaluate("document.cookie") == ""
    await two.open(f"{proxy.url}/#link={link}")
    await two.until("document.querySelector('[role=alert]')")
    assert "a link works once" in await two.text("main")
    await three.open(f"{proxy.url}/#key={key}")
    await three.until("document.querySelector('header .dot.on')")
    await store.browser.revoke_grants("ana")
    await three.evaluate("location.hash = '#/sessions'")
    await three.until("document.querySelector('#secret')")
    await one.click("header button")
    await one.until("document.querySelector('#secret')")
    await store.close()


async def test_session_is_recognised_rated_tagged_exported_and_deleted_in_the_page(
    proxy: RunningProxy, tab: Tab, tmp_path: Path
) -> None:
    where = {"agent": "claude-code", "folder": "/home/me/shop", "git_branch": "repairs"}
    session = await proxy.session(trial_id="day/1", metadata=where)
    await work(proxy, session, "Fix the till.\nAnd the drawer.", turns=2)
    await enter(tab, proxy)
    await show(tab, "/sessions", "document.querySelector('.sessions tbody tr')")
    row = await tab.text(".sessions tbody tr")
    assert all(each in row for each in ("Fix the till.", "day/1", "shop", "repairs"))
    assert "drawer" not in row
    assert "/home/me" not in row
    up, down = (f".sessions .thumbs button[aria-label={name}]" for name in ("Good", "Bad"))
    await tab.click(up)
    await tab.until(f"document.querySelector('{up}').ariaPressed === 'true'")
    await tab.click(down)
    await tab.until(f"document.querySelector('{down}').ariaPressed === 'true'")
    assert await rating(proxy) == 0.0

    await show(tab, "/trial/day%2F1", "document.querySelector('.curation')")
    await tab.click(".curation > p > button")
    await tab.evaluate(
        "document.querySelector('.curation [name=value]').value = '0.75';"
        f"document.querySelector('.curation [name=comment]').value = {HOSTILE[:60]!r}"
    )
    # What is typed stays when the agent's next call comes.
    await work(proxy, session, "Now the drawer.", turns=1)
    await tab.until("document.querySelectorAll('.tree li').length === 3")
    await tab.click(".curation form:first-child button")
    await tab.until("document.querySelector('.curation .comment')?.innerText.includes('<script>')")
    assert await rating(proxy) == 0.75
    await tab.evaluate(
        "document.querySelector('.curation form:nth-child(2) [name=value]').value = 'till'"
    )
    await tab.evaluate(
        "document.querySelector('.curation form:nth-child(2) [name=name]').value = 'topic'"
    )
    await tab.click(".curation form:nth-child(2) button")
    await tab.until("document.querySelector('.curation .tag')?.innerText.includes('topic=till')")
    assert (await proxy.control.show("day/1"))["metadata"] == {**where, "topic": "till"}
    await tab.click(".curation .tag button")
    await tab.until("!document.querySelector('.curation .tag')")
    assert (await proxy.control.show("day/1"))["metadata"] == where

    await tab.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    await tab.click(".curation .edit > p > button")
    file = tmp_path / "day-1.messages.jsonl"
    for _ in range(600):
        if file.is_file():
            break
        await asyncio.sleep(0.05)
    assert "Fix the till." in file.read_text()

    # It is open, but its agent makes no call.
    await tab.click(".curation .edit > p > button:last-of-type")
    await tab.click(".curation .danger")
    await tab.until("document.body.innerText.includes('No session matches.')")
    assert await tab.evaluate("window.hacked") is None
    assert tab.complaints == []


async def rating(proxy: RunningProxy) -> float:
    (reward,) = (await proxy.control.show("day/1"))["rewards"]
    assert reward["key"] == "rating"
    return float(reward["value"])


async def test_reader_without_the_right_sees_ratings_and_how_to_get_it(
    start_proxy: StartProxy, browser: Chromium, tmp_path: Path
) -> None:
    store = await open_store(f"sqlite:///{tmp_path}/read.db")
    proxy = await start_proxy(store=store)
    await work(proxy, await proxy.session(trial_id="day/1"), "Fix the till.", turns=1)
    await proxy.control.curate("day/1", value=1.0)
    tab = await browser.tab()
    await tab.open(f"{proxy.url}/#link={await new_link(store.browser)}")
    await tab.until("document.querySelector('header .dot.on')")
    await show(tab, "/sessions", "document.querySelector('.sessions .rated')")
    assert not await tab.evaluate("document.querySelector('.thumbs')")
    await show(tab, "/trial/day%2F1", "document.querySelector('.curation')")
    await tab.click(".curation > p > button")
    assert "agentic-proxy view --edit" in await tab.text(".curation")
    assert not await tab.evaluate("document.querySelector('.curation form, .danger')")
    await store.close()


async def test_session_opens_at_its_last_turn_with_the_system_prompt_folded(
    proxy: RunningProxy, tab: Tab
) -> None:
    session = await proxy.session(trial_id="long")
    system = {"role": "system", "content": "Be careful. " * 600}
    messages = [system, user("Read everything.")]
    for number in range(6):
        proxy.answers(f"Answer {number}: " + "it goes on and on. " * 40)
        messages += [await call(proxy, session, messages), user(f"Question {number}?")]
    await enter(tab, proxy)
    await show(tab, "/trial/long", "document.querySelectorAll('.message').length > 3")
    place = "document.querySelector('#turn-5').getBoundingClientRect()"
    await tab.until(f"{place}.top >= 0 && {place}.bottom <= innerHeight")
    await tab.until("document.querySelector('#turn-5').innerText.includes('Answer 5')")
    await show(tab, "/trial/long?turn=0", "document.querySelector('.message.system .folded')")
    folded = "document.querySelector('.message.system .folded')"
    assert await tab.evaluate(f"{folded}.open") is False
    assert "7,200 characters" in await tab.text(".message.system")
    assert await tab.evaluate(f"{folded}.getBoundingClientRect().height < 40")
    # A reader who has moved stays where they are when the next turn comes.
    await show(tab, "/trial/long", "document.querySelectorAll('.message').length > 3")
    await tab.until(f"{place}.top >= 0 && {place}.bottom <= innerHeight")
    await tab.press("Home", 36)
    await tab.evaluate("scrollTo(0, 0)")
    await call(proxy, session, messages)
    await tab.until("document.querySelectorAll('.tree li').length === 7")
    await tab.until("document.querySelectorAll('.turn').length === 7")
    assert await tab.evaluate("scrollY") == 0
    assert tab.complaints == []


async def test_session_whose_only_call_was_refused_says_why(
    start_proxy: StartProxy, tab: Tab
) -> None:
    proxy = await start_proxy(max_context_tokens=1000)
    session = await proxy.session(trial_id="long")
    long = {"messages": [user("Hi. " * 5000 + HOSTILE)]}
    assert (await proxy.post(session, "chat/completions", long))[0] == 400
    await enter(tab, proxy)
    await show(tab, "/sessions", "document.querySelector('table.sessions tbody tr')")
    assert "refused" in await tab.text("table.sessions tbody tr")
    await show(tab, "/trial/long", "document.querySelector('.refused')")
    assert "A call was refused with 400: " in await tab.text(".refused")
    assert "1000" in (await tab.text(".refused")).replace(",", "")
    assert "No call was answered." in await tab.text("main")
    assert tab.complaints == []


async def test_search_is_saved_as_a_rule_that_marks_sessions_live(
    proxy: RunningProxy, tab: Tab
) -> None:
    await enter(tab, proxy)
    await show(tab, "/search?edits_tests=yes", "document.querySelector('.rules form')")
    await tab.evaluate("document.querySelector('.rules input[name=name]').value = 'cheats'")
    await tab.click(".rules form button")
    await tab.until("document.querySelector('.rules li')?.innerText.includes('cheats')")
    await show(tab, "/sessions?marked=cheats", "document.body.innerText.includes('No session')")
    await tab.evaluate("document.querySelector('[name=prefix]').value = 'half a wo'")
    await work(proxy, await proxy.session(trial_id="honest"), "Hello.", turns=2)
    command = "echo pass > tests/test_a.py # " + HOSTILE
    asked = json.dumps({"name": "shell", "arguments": {"command": command}})
    proxy.answers(f"<tool_call>\n{asked}\n</tool_call>")
    await call(proxy, await proxy.session(trial_id="cheater"), [user("Make the tests pass.")])
    await tab.until("document.querySelector('.filters button')")
    # What is being typed stays while the list hears of something new.
    assert await tab.evaluate("document.querySelector('[name=prefix]').value") == "half a wo"
    assert await tab.evaluate("document.querySelector('[name=marked]').value") == "cheats"
    await tab.until(
        "document.querySelector('.filters button')?.click()"
        " || document.querySelectorAll('.sessions tbody tr').length === 1"
    )
    assert "cheater" in await tab.text(".sessions tbody")
    assert await tab.text(".sessions .tag.mark") == "cheats"
    await show(tab, "/trial/cheater", "document.querySelector('.tag.mark')")
    await show(tab, "/search?edits_tests=yes", "document.querySelector('.hits li')")
    assert await tab.text(".hits mark") == "tests/test_a.py"
    await tab.click(".rules li button")
    await tab.until("!document.querySelector('.rules li')")
    assert await tab.evaluate("window.hacked") is None
    assert tab.complaints == []
