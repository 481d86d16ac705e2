"""A full disk ends a command with one sentence, whichever of its files is written first."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from proxy.run_files.files import replace_file
from trainer.commands.runs import reporting
from trainer.errors import TrainerError


def raising(error: BaseException) -> Callable[[], int]:
    def command() -> int:
        raise error

    return command


def full(name: str | None = None) -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)


def test_file_that_is_replaced_on_a_full_disk_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def no_room(_: int) -> None:
        raise full()

    monkeypatch.setattr(os, "fsync", no_room)
    path = tmp_path / "config.yaml"

    def command() -> int:
        replace_file(path, "a: 1")
        return 0

    assert reporting("agentic-train", command) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"agentic-train: the disk of {path} is full")
    assert "free space on it" in line


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_within_groups_is_one_sentence(
    capsys: pytest.CaptureFixture[str], number: int
) -> None:
    inner = ExceptionGroup("tasks", [OSError(number, os.strerror(number), "/runs/a/trials.jsonl")])
    assert reporting("x", raising(ExceptionGroup("all", [inner, TrainerError("b")]))) == 1
    assert "the disk of /runs/a/trials.jsonl is full" in capsys.readouterr().err


def test_full_disk_of_sqlite_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> int:
        database = sqlite3.connect(tmp_path / "buffer.sqlite")
        try:
            database.execute("PRAGMA max_page_count = 1")
            database.execute("CREATE TABLE t (a)")
        finally:
            database.close()
        return 0

    assert reporting("x", command) == 1
    assert "is full" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [PermissionError("x"), sqlite3.OperationalError("x"), ExceptionGroup("a", [KeyError()])],
)
def test_other_errors_are_bugs_with_a_traceback(error: Exception) -> None:
    with pytest.raises(type(error)):
        reporting("x", raising(error))
