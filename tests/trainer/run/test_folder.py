"""One run per folder at a time; files are written completely or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from proxy.run_files.files import read_jsonl, replace_file, truncate_jsonl
from trainer.errors import ConfigError
from trainer.run.folder import RunFolder


def test_create_numbers_a_folder_that_exists(tmp_path: Path) -> None:
    first = RunFolder.create(tmp_path / "runs" / "a")
    second = RunFolder.create(tmp_path / "runs" / "a")
    assert first.path.name == "a"
    assert second.path.name == "a-2"
    first.unlock()
    second.unlock()


def test_second_process_cannot_lock_a_run(tmp_path: Path) -> None:
    running = RunFolder.create(tmp_path / "a")
    running.config.write_text("{}")
    with pytest.raises(ConfigError, match="another process"):
        RunFolder.open(running.path).lock()
    running.unlock()
    again = RunFolder.open(running.path)
    again.lock()
    again.unlock()


def test_latest_run_is_the_one_with_the_highest_number(tmp_path: Path) -> None:
    assert RunFolder.latest(tmp_path / "a") is None
    folders = [RunFolder.create(tmp_path / "a") for _ in range(3)]
    for folder in folders[:2]:
        folder.config.write_text("{}")
    latest = RunFolder.latest(tmp_path / "a")  # the third was killed before it had a configuration
    assert latest is not None
    assert latest.path == tmp_path / "a-2"
    for folder in folders:
        folder.unlock()


def test_run_whose_process_died_has_status_killed_and_is_not_running(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "a")
    folder.write_summary({"status": "running"})
    assert RunFolder(folder.path).read_summary() == {"status": "running"}
    folder.unlock()
    assert RunFolder(folder.path).read_summary() == {"status": "killed"}
    folder.write_summary({"status": "done"})
    assert RunFolder(folder.path).read_summary() == {"status": "done"}


def test_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        RunFolder.open(tmp_path)


def test_folder_that_cannot_be_made_is_refused_with_the_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"trainer\.run_dir"):
        RunFolder.create(tmp_path / "file" / "run")


def test_incomplete_last_line_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert [line["step"] for line in read_jsonl(path)] == [1, 2]


def test_steps_after_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    truncate_jsonl(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_failed_replacement_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    replace_file(path, "old")
    with pytest.raises(UnicodeEncodeError):
        replace_file(path, "\ud800")
    assert path.read_text() == "old"


def test_run_keeps_its_name_and_an_empty_one_is_refused(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    name = folder.run_id
    assert name.startswith("run-")
    assert RunFolder(folder.path).run_id == name
    (folder.path / "run.id").write_text("")
    with pytest.raises(ConfigError, match=r"run\.id: is empty"):
        _ = folder.run_id


def test_name_of_a_run_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = RunFolder.create(tmp_path / "run")
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match=r"No space left on device: '.*/run/run\.id'"):
        _ = folder.run_id
    assert not (folder.path / "run.id").exists()
