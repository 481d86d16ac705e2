"""What the newest version of an agent is compared with, and what is said of it."""

from __future__ import annotations

import json
from dataclasses import replace

from tests.e2e.agents.census.newest import INSTALLED, MOVED, NPM, PINNED, news, wanted
from tests.e2e.agents.census.run import Row

PINNED_ROW = Row("pi", "0.73.1", "qwen3.5", "done", ["bash", "read"], ["bash", "read"], 19, 1)


def test_newest_version_of_a_package_is_looked_for_where_it_is_now() -> None:
    packages = wanted({"cline": "3.0.65", "codex-0.77": "npm:@openai/codex@0.77.0", **MOVED})
    assert packages["cline"] == "latest"
    assert packages["codex-0.77"] == "npm:@openai/codex@0.77.0"
    assert [packages[name] for name in MOVED] == [f"npm:{now}@latest" for now in MOVED.values()]


def test_every_moved_package_is_pinned() -> None:
    files = [json.loads((PINNED / file).read_text()) for file, _ in NPM.values()]
    assert MOVED.keys() <= {name for each in files for name in each["dependencies"]}
    assert len(set(INSTALLED)) == len(INSTALLED)


def test_news_are_versions_tools_and_faults() -> None:
    assert news(PINNED_ROW, PINNED_ROW) == []
    newest = replace(PINNED_ROW, version="1.6.0", offered=["bash", "edit"], refused=["400 no"])
    assert news(PINNED_ROW, newest) == [
        "pi: 0.73.1 → 1.6.0",
        "pi: new tool edit",
        "pi: no tool read any more",
        "pi: 400 no",
    ]
    unknown = "pi 1.6.0: the pinned version has no result"
    assert news(None, newest) == [unknown, "pi: 400 no"]
