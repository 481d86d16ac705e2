"""Growing files of JSON lines, read from either end and by step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from proxy.run_files import json_lines
from proxy.run_files.json_lines import last_line_with, lines_after, lines_before, lines_of_step


def write(path: Path, steps: list[int], tail: str = "") -> Path:
    path.write_text("".join(json.dumps({"step": n, "pad": "x" * n}) + "\n" for n in steps) + tail)
    return path


def all_before(path: Path, limit: int = 3) -> list[int]:
    """All steps, the last one first, read page by page."""
    found: list[int] = []
    end: int | None = None
    while True:
        lines, end = lines_before(path, end, lambda line: True, limit)
        assert len(lines) <= limit
        found += [line["step"] for _, line in lines]
        if end is None:
            return found


@pytest.mark.parametrize("piece", [16, 64, 10_000])
def test_reading_on_from_either_end_gives_each_line_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(json_lines, "PIECE_BYTES", piece)
    steps = [0, 1, 1, 2, 50, 51, 300, 301, 302]
    path = write(tmp_path / "lines", steps, tail='{"step": 303, "pa')
    found, start = [], 0
    while True:
        lines, end = lines_after(path, start)
        found += [line["step"] for line in lines]
        if end == start:
            break
        start = end
    assert found == steps
    assert all_before(path) == steps[::-1]


def test_unwanted_lines_are_passed_over_and_the_place_is_after_them(tmp_path: Path) -> None:
    path = write(tmp_path / "lines", list(range(20)))
    lines, end = lines_before(path, None, lambda line: line["step"] % 5 == 0, 2)
    assert [line["step"] for _, line in lines] == [15, 10]
    lines, end = lines_before(path, end, lambda line: line["step"] % 5 == 0, 2)
    assert [line["step"] for _, line in lines] == [5, 0]
    assert end is None


def test_lines_of_a_step_are_found_wherever_they_are(tmp_path: Path) -> None:
    steps = [0, 0, 3, 3, 3, 700, 701, 701]
    path = write(tmp_path / "lines", steps)
    for step in (*steps, 1, 2, 4, 702):
        found, more = lines_of_step(path, step, 100)
        assert [line["step"] for line in found] == [each for each in steps if each == step]
        assert not more
    for limit, left in ((2, True), (3, False)):
        found, more = lines_of_step(path, 3, limit)
        assert (len(found), more) == (limit, left)
    assert lines_of_step(path, 3, 3, lambda line: line["pad"] == "") == ([], False)


def test_last_line_of_a_name_is_found_where_other_lines_mention_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_lines, "PIECE_BYTES", 64)
    path = tmp_path / "lines"
    names = ['a"b', "c", 'a"b', "é", "d"]
    lines = [{"id": name, "n": n, "why": 'see a"b', "of": "c"} for n, name in enumerate(names)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"id": "open"')
    found = {name: last_line_with(path, "id", name) for name in [*names, "open", "see a"]}
    assert {name: line and line["n"] for name, line in found.items()} == {
        'a"b': 2,
        "c": 1,
        "é": 3,
        "d": 4,
        "open": None,
        "see a": None,
    }
    monkeypatch.setattr(json_lines, "SEARCHED_BYTES", 100)
    assert last_line_with(path, "id", "c") is None
    assert last_line_with(tmp_path / "none", "id", "c") is None


def test_foreign_lines_are_empty_and_missing_files_have_none(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"\xff\n[1]\nnull\n\n" + b'{"step": "x"}\n')
    assert lines_after(path, 0)[0] == [{}, {}, {}, {}, {"step": "x"}]
    assert lines_of_step(path, 3, 9) == ([], False)
    assert lines_before(tmp_path / "none", None, lambda line: True, 3) == ([], None)
    assert lines_after(tmp_path / "none", 5) == ([], 0)


def test_lone_surrogates_are_replaced_and_lines_nested_too_deeply_left_out(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    deep = "[" * 100_000 + "]" * 100_000
    hostile = r'{"step": 1, "a\ud800": ["\uDC00x", "\ud83d\ude00"]}'
    path.write_text(f'{hostile}\n{{"step": {deep}}}\n{{"step": 2}}\n')
    lines = [{"step": 1, "a?": ["?x", "\U0001f600"]}, {}, {"step": 2}]
    assert lines_after(path, 0)[0] == lines
    found, _ = lines_before(path, None, lambda line: True, 3)
    assert [line for _, line in found] == lines[::-1]
