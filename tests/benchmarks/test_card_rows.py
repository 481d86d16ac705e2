"""`benchmarks.gpu.card`: rows that are kept, and the goals that follow from them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import card

ROWS: dict[str, dict[str, Any]] = {
    "step 1.7b, not shared": {"share": 0.4, "share of computed": 0.4},
    "step 1.7b, shared": {"share": 0.6, "share of computed": 0.3},
    "waits 0.6b, shared": {"waits": 1},
    "first trial quickstart": {"seconds": 44.0},
    "vllm serve quickstart": {"seconds": 40.0},
}


def test_goals_are_figures_of_rows_that_exist() -> None:
    names = {row.name for row in card.ROWS}
    assert len(names) == len(card.ROWS)
    for goal in card.GOALS:
        assert {goal.figure[0], *([goal.over[0]] if goal.over else [])} <= names
    assert all(row.kind in card.MEASURES or row.kind in card.SERVED for row in card.ROWS)
    assert card.ROWS[-1].kind == "profile"


def test_goal_is_a_figure_or_a_ratio_and_none_without_its_rows() -> None:
    found = {goal.name: goal.of(ROWS) for goal in card.GOALS}
    assert found["share of the card, 1.7 B"] == 0.4
    assert found["share of the card, 4 B"] is None
    assert found["share of what is computed, prefixes shared ÷ not shared"] == 0.75
    assert found["waits in a step, with one for the metrics"] == 1
    assert found["seconds until the first trial ÷ a bare vllm serve"] == pytest.approx(1.1)
    assert found["answers/s through the proxy ÷ the same vLLM alone"] is None


def test_started_again_it_measures_what_failed_or_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[str] = []
    fails = {"copy tiny, shared, eager"}

    def stand_in(row: card.Row, _device: str) -> dict[str, Any]:
        measured.append(row.name)
        return {"failed": "no memory"} if row.name in fails else {"seconds": 1.0}

    monkeypatch.setattr(card, "_in_a_process", stand_in)
    words = ["card", "--device", "cpu", "--rows", str(tmp_path / "rows.jsonl")]
    monkeypatch.setattr(sys, "argv", words)
    assert card.main() == 1
    first, measured[:] = list(measured), []
    assert {name.partition(" tiny")[0] for name in first} == {*card.MEASURES, *card.SERVED}
    assert first[-1] == "profile tiny, shared, eager"
    fails.clear()
    assert card.main() == 0
    assert measured == ["copy tiny, shared, eager"]
    assert "not shown by a card yet" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == len(first) + 1
