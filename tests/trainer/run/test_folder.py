"""One run per folder at a time; files whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.errors import ConfigError
from trainer.run.folder import RunFolder, read_jsonl, replace_file, truncate_jsonl


def test_a_used_folder_gets_a_number(tmp_path: Path) -> None:
    first = RunFolder.create(tmp_path / "runs" / "a")
    second = RunFolder.create(tmp_path / "runs" / "a")
    assert first.path.name == "a"
    assert second.path.name == "a-2"
    first.unlock()
    second.unlock()


def test_a_folder_is_one_runs_at_a_time(tmp_path: Path) -> None:
    running = RunFolder.create(tmp_path / "a")
    running.config.write_text("{}")
    with pytest.raises(ConfigError, match="another process"):
        RunFolder.open(running.path).lock()
    running.unlock()
    again = RunFolder.open(running.path)
    again.lock()
    again.unlock()


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        RunFolder.open(tmp_path)


def test_a_folder_that_cannot_be_made_names_the_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"trainer\.run_dir"):
        RunFolder.create(tmp_path / "file" / "run")


def test_a_line_cut_by_a_kill_is_no_line(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert [line["step"] for line in read_jsonl(path)] == [1, 2]


def test_later_steps_than_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    truncate_jsonl(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_failed_replacement_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    replace_file(path, "old")
    with pytest.raises(UnicodeEncodeError):
        replace_file(path, "\ud800")
    assert path.read_text() == "old"
