"""What a learner has decided, in the page: a real Chromium, and a journal in a learner's folder."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from proxy.extras.learn.client import LearnClient
from proxy.extras.learn.section import TARGET
from tests.needs import needs, skip_or_fail
from tests.proxy.conftest import ADMIN_KEY, RunningProxy, StartProxy
from tests.proxy.extras.view.chromium import MISSING, Tab
from tests.proxy.extras.view.conftest import enter, show
from tests.proxy.extras.view.documented import check_answer
from tests.proxy.extras.view.recording import HOSTILE
from tests.proxy.extras.view.test_page import AXE, NO_OVERFLOW, violations

BEGAN = 1_800_000_000.0
ROWS = "[...document.querySelectorAll('.decisions tbody tr')]"
JOURNAL: list[dict[str, Any]] = [
    {"kind": "begin"},
    *({"kind": "session", "session": f"s-{n}", "value": 1.0} for n in range(8)),
    {"kind": "update", "number": 1, "parent": 0, "sessions": ["s-0", "s-1"], "replayed": []},
    {
        "kind": "gate",
        "number": 1,
        "passed": False,
        "measures": {"kl": 0.5, "entropy": None},
        "why": ["KL 0.5 above gates.max_kl=0.3"],
    },
    {
        "kind": "rollback",
        "number": 1,
        "by": "gate",
        "why": ["KL 0.5 above gates.max_kl=0.3"],
        "set_aside": ["s-0", "s-1"],
    },
    {"kind": "update", "number": 2, "parent": 0, "sessions": ["s-2"], "replayed": ["s-0"]},
    {"kind": "gate", "number": 2, "passed": True, "measures": {"kl": 0.02}, "why": []},
    {"kind": "canary", "number": 2, "stable": 0, "share": 0.5},
    {"kind": "compare", "number": 2, "since": BEGAN},
    {
        "kind": "order",
        "order": "rollback",
        "number": 2,
        "by": "person",
        "person": "ann",
        "said_at": BEGAN - 86_400,
        "switch": "a",
    },
    {
        "kind": "promote",
        "number": 2,
        "by": "test",
        "better": 21.3,
        "worse": 0.2,
        "alpha": 0.05,
        "well": {"canary": [9, 10], "stable": [4, 11]},
        "compared": [f"s-{n}" for n in range(8)],
    },
    {"kind": "freeze", "by": "person"},
    {"kind": "thaw", "by": "person"},
    {"kind": "forgot", "count": 2, "sessions": ["00ff", "11ff"]},
]


def write(folder: Path, lines: list[dict[str, Any]]) -> None:
    folder.mkdir(exist_ok=True)
    text = (json.dumps({"at": BEGAN + n, **line}) + "\n" for n, line in enumerate(lines))
    (folder / "journal.jsonl").write_text("".join(text), encoding="utf-8")


@contextmanager
def running(folder: Path) -> Iterator[None]:
    """The lock of a learner that runs."""
    file = os.open(folder / "run.lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(file)


def learners(folder: Path, *names: str) -> dict[str, Any]:
    recorders = [{"policy": name, "folder": str(folder / name)} for name in names]
    return {"extras": [{"target": TARGET, "settings": {"recorders": recorders}}]}


async def asked(proxy: RunningProxy, **query: str) -> tuple[int, Mapping[str, Any]]:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    url = f"{proxy.url}/view/decisions"
    async with proxy.http.get(url, params=query, headers=headers) as response:
        check_answer("/view/decisions", "get", response.status, await response.read())
        return response.status, await response.json()


async def test_decisions_are_read_page_by_page_whatever_the_journal_holds(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    proxy = await start_proxy(**learners(tmp_path, "work"))
    assert (await asked(proxy, policy="work")) == (200, {"decisions": [], "next": None})
    assert (await asked(proxy, policy="other"))[0] == 404
    write(tmp_path / "work", JOURNAL)
    with (tmp_path / "work" / "journal.jsonl").open("ab") as file:
        file.write(b"not JSON\n[1]\n" + b'{"kind": "promote", "at": "x"}\n{"kind": "rollb')
    found: list[Mapping[str, Any]] = []
    before: dict[str, str] = {}
    while True:
        status, page = await asked(proxy, policy="work", limit="3", **before)
        assert status == 200
        assert len(page["decisions"]) <= 3
        found += page["decisions"]
        if page["next"] is None:
            break
        before = {"before": str(page["next"])}
    assert [each["kind"] for each in found] == [
        *("forgot", "thaw", "freeze", "promote", "order", "canary", "gate", "update"),
        *("rollback", "refused", "update"),
    ]
    promoted = found[3]
    assert promoted["went_well"] == {"canary": [9, 10], "stable": [4, 11]}
    assert promoted["figures"] == {"better": 21.3, "worse": 0.2, "alpha": 0.05}
    assert promoted["sessions"] == [f"s-{n}" for n in range(8)]
    assert found[9]["figures"] == {"kl": 0.5}
    assert found[8]["figures"] == {"set_aside": 2.0}
    assert (found[4]["person"], found[4]["at"]) == ("ann", BEGAN - 86_400)
    assert found[0]["sessions"] == []


@pytest.mark.programs
@needs(MISSING)
async def test_every_decision_is_in_the_page_with_its_figures_and_its_reason(
    start_proxy: StartProxy, tmp_path: Path, tab: Tab
) -> None:
    proxy = await start_proxy(**learners(tmp_path, "work", "team"))
    write(tmp_path / "work", JOURNAL)
    await enter(tab, proxy)
    await tab.until("[...document.querySelectorAll('nav a')].some(a => a.innerText === 'Learning')")
    await show(tab, "/learning", f"{ROWS}.length === 11")
    told = await tab.evaluate(
        f"{ROWS}.map(row => [...row.children].slice(1).map(cell => cell.innerText))"
    )
    assert [row[:3] for row in told] == [
        ["", "forgotten", "person"],
        ["", "thawed", "person"],
        ["", "frozen", "person"],
        ["2", "promoted", "test"],
        ["2", "ordered", "ann"],
        ["2", "became the canary", "learner"],
        ["2", "passed its gates", "learner"],
        ["2", "trained", "learner"],
        ["1", "discarded", "gate"],
        ["1", "refused by a gate", "learner"],
        ["1", "trained", "learner"],
    ]
    assert "went well: canary 9 of 10, stable 4 of 11" in told[3][3]
    assert "evidence that it is better 21.3, that it is worse 0.2 (20 decides)" in told[3][3]
    assert "compared 8 sessions" in told[3][3]
    assert told[4][3] == "to roll it back"
    assert "50 % of new sessions, compared with the model as it is" in told[5][3]
    assert told[7][3].startswith("from the model as it is; with 1 earlier session again")
    assert told[8][3] == "its 2 sessions will not be trained again"
    assert "KL 0.5; KL 0.5 above gates.max_kl=0.3" in told[9][3]
    assert "2 sessions" in told[0][3]
    await tab.evaluate(f"{ROWS}[3].querySelector('summary').click()")
    await tab.until(f"{ROWS}[3].querySelectorAll('details[open] a').length === 8")

    text = await tab.text("main")
    assert "The learner does not run: as of " in text
    assert "Nothing is decided yet" in text
    assert "The learner has not run yet." in text
    with running(tmp_path / "work"):
        await tab.until("document.querySelector('main').innerText.includes('The learner runs.')")
        more = [
            {"kind": "update", "number": 3, "parent": 2, "sessions": ["s-4"], "failed": "NaN"},
            {"kind": "rollback", "number": 4, "by": "interrupted"},
            {"kind": "rollback", "number": 5, "by": "undecided", "well": {"canary": [1, 40]}},
            {"kind": "rollback", "number": 6, "by": "newer", "well": {"canary": [2, 9]}},
        ]
        write(tmp_path / "work", [*JOURNAL, *more])
        await tab.until(f"{ROWS}.length === 15")
        told = await tab.evaluate(f"{ROWS}.slice(0, 4).map(row => row.innerText)")
        for row, words in zip(
            told,
            (
                ("rolled back", "learner", "gave way, after 9 sessions, to one that has learned"),
                ("rolled back", "learner", "undecided after 40 sessions"),
                ("discarded", "learner", "stopped before it was finished"),
                ("not trained", "from adapter 2; NaN", "from 1 session"),
            ),
            strict=True,
        ):
            assert all(word in row for word in words), row
    async with LearnClient(proxy.url, ADMIN_KEY) as admin:
        await admin.order("work", "freeze")
    await tab.until("document.querySelector('.served').innerText.includes('Frozen')")
    assert tab.complaints == []


@pytest.mark.programs
@needs(MISSING)
async def test_decisions_are_text_that_fits_a_phone_in_both_colours(
    start_proxy: StartProxy, tmp_path: Path, tab: Tab
) -> None:
    if not AXE.is_file():
        skip_or_fail("axe-core is not installed: python -m benchmarks.install tools")
    proxy = await start_proxy(**learners(tmp_path, "work"))
    hostile = {
        "kind": "rollback",
        "number": 3,
        "by": HOSTILE,
        "why": [HOSTILE, "x" * 5_000],
        "well": {HOSTILE: [1, 2]},
        "compared": [HOSTILE, "evil/" + "a" * 300],
    }
    measured = {"kind": "gate", "number": 3, "measures": {HOSTILE: 1.0}, "why": []}
    write(tmp_path / "work", [*JOURNAL, measured, hostile])
    await enter(tab, proxy)
    await tab.call("Page.setBypassCSP", enabled=True)  # for axe, which the page would not run
    await tab.call("Page.reload")
    await tab.until("document.querySelector('header .dot.on')")
    await tab.evaluate(AXE.read_text() + "; undefined")
    for scheme in ("light", "dark"):
        await tab.colours(scheme)
        await show(tab, "/learning", f"{ROWS}.length === 13")
        await tab.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        assert await violations(tab) == []
    told = await tab.text(".decisions tbody tr")
    assert told.count("<script>window.hacked = 1</script>") == 4
    assert "⟨U+202E⟩gnp.exe" in told
    await tab.size(390, 844, phone=True)
    await show(tab, "/learning", f"{ROWS}.length === 13")
    assert await tab.evaluate(NO_OVERFLOW)
    assert await tab.evaluate("window.hacked") is None
    assert await tab.evaluate("document.querySelectorAll('main script, main img').length") == 0
    assert tab.complaints == []
