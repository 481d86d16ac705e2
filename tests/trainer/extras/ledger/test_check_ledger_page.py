"""docs/check_ledger.html in a browser: it accepts a recorded run, and names what was changed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.needs import needs
from tests.proxy.extras.view.chromium import MISSING, Tab, chromium
from tests.trainer.extras.ledger.recorded_run import STEPS, Recorded
from trainer.extras.ledger.ledger import line_hash, read_lines

pytestmark = [needs(MISSING), pytest.mark.programs]
PAGE = Path(__file__).parents[4] / "docs" / "check_ledger.html"
WEIGHTS = "checkpoints/step-000002/model/model.safetensors"
Line = dict[str, Any]


@pytest.fixture
async def tab(tmp_path: Path) -> AsyncIterator[Tab]:
    async with chromium(tmp_path / "profile") as browser:
        tab = await browser.tab()
        await tab.open(PAGE.as_uri())
        await tab.until("document.querySelector('#run')")
        yield tab
        assert tab.complaints == []


async def said(tab: Tab, run: Path, other: Path | None = None) -> str:
    """What the page says of the folders that were chosen."""
    root = (await tab.call("DOM.getDocument"))["root"]["nodeId"]
    for name, folder in {"run": run, "other": other}.items():
        if folder is None:
            continue
        await tab.evaluate("document.querySelector('#said').replaceChildren()")
        node = await tab.call("DOM.querySelector", nodeId=root, selector=f"#{name}")
        await tab.call("DOM.setFileInputFiles", nodeId=node["nodeId"], files=[str(folder)])
        await tab.until("document.querySelector('#said').children.length")
    return await tab.text("#said")


def lines_of(folder: Path) -> list[Line]:
    return [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]


def write(folder: Path, lines: list[Line], *, chained: bool = False) -> None:
    """`chained`: with the hashes that these lines have."""
    previous = ""
    for line in lines if chained else ():
        line["previous"] = previous
        line["hash"] = previous = line_hash(line)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "ledger.jsonl").write_text(text)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def another_reward(folder: Path) -> None:
    lines = lines_of(folder)
    lines[1]["groups"][0]["trials"][0]["reward"] = 0.25
    write(folder, lines)


def without_a_line(folder: Path) -> None:
    lines = lines_of(folder)
    write(folder, [lines[0], *lines[2:]])


def in_another_order(folder: Path) -> None:
    first, one, two, *rest = lines_of(folder)
    write(folder, [first, two, one, *rest])


def trained_twice(folder: Path) -> None:
    lines = lines_of(folder)
    lines[2]["groups"][0]["trials"][0]["trial"] = lines[1]["groups"][0]["trials"][0]["trial"]
    write(folder, lines, chained=True)


def no_ledger(folder: Path) -> None:
    (folder / "ledger.jsonl").unlink()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (another_reward, "a line of step 1 was changed"),
        (without_a_line, "a line of step 2 does not follow the line before it"),
        (in_another_order, "a line of step 2 does not follow the line before it"),
        (trained_twice, "trial task-1-0-0 was trained twice"),
        (no_ledger, "this folder has no ledger.jsonl"),
        (lambda f: flip(f / "batches/step-000003", 40), "batches/step-000003 is missing or was"),
        (lambda f: (f / "batches/step-000001").unlink(), "batches/step-000001 is missing or was"),
        (lambda f: flip(f / "config.yaml", 3), "config.yaml is missing or was changed"),
        (lambda f: flip(f / WEIGHTS, -1), f"{WEIGHTS} has not the weights of step 2"),
    ],
)
async def test_a_change_is_named(
    copy: Path, tab: Tab, change: Callable[[Path], None], problem: str
) -> None:
    change(copy)
    text = await said(tab, copy)
    assert f"run: {problem}" in text
    assert "every hash is right" not in text


async def test_a_run_as_it_was_written(run: Recorded, copy: Path, tab: Tab) -> None:
    folder = run.folder.path
    head = read_lines(folder / "ledger.jsonl")[-1]["hash"]
    text = await said(tab, folder)
    assert text == f"run: {STEPS} steps: every hash is right. The last one: {head}"
    rows = "[...document.querySelectorAll('#steps tr')].map(row => row.innerText.split('\\t'))"
    shown = await tab.evaluate(rows)
    turns = [
        [turn for group in line["groups"] for trial in group["trials"] for turn in trial["turns"]]
        for line in lines_of(folder)[1:]
    ]
    assert [row[2] for row in shown[1:]] == [str(sum(t["trained"] for t in own)) for own in turns]
    assert f"Gradients and weights of {STEPS} steps are equal." in await said(tab, folder, copy)


async def test_the_first_step_that_differs_is_named(run: Recorded, copy: Path, tab: Tab) -> None:
    lines = lines_of(copy)
    lines[2]["policies"][""]["gradients"][0] = "another"
    write(copy, lines, chained=True)
    text = await said(tab, run.folder.path, copy)
    assert "They differ from step 2 on." in text
    assert text.count("every hash is right") == 2


async def test_numbers_and_names_are_hashed_as_they_are_written(copy: Path, tab: Tab) -> None:
    """Another program than Python's writes 1e-05, 1.0 and letters beyond ASCII otherwise."""
    lines = lines_of(copy)
    lines[0]["model"] = {"b!": "1", "b": "2", "é €.safetensors": '"{[,:\\ "', "B": ""}
    lines[1]["sums"] = {"x": [1e-05, 1.0, -0.0, 1e22, 123456789012345678, 0.1], "e": {}, "f": []}
    write(copy, lines, chained=True)
    assert "every hash is right" in await said(tab, copy)
