"""What a run does at this moment, as the page reads it."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent_loop.producers.protocol import Production
from agent_loop.records import Rollout, RolloutStatus, Task
from proxy.extras.view.run_folder import NOW_BYTES, RecordedRun
from proxy.machine.secrecy import MAX_CHARS
from trainer.run.folder import RunFolder
from trainer.run.log import LoggingConfig, RunLog
from trainer.run.now import ERROR_CHARS, KEPT_ERRORS, NowFile


def a_rollout(name: str, status: RolloutStatus, error: str | None = None) -> Rollout:
    return Rollout(name, Task("t", {}), status, None, error=error)


def now(folder: RunFolder) -> Any:
    return now_of(folder.path)


def now_of(path: Path) -> Any:
    return RecordedRun(path).stamps()["now"]


def test_phase_and_its_trials_are_shown_until_the_run_ends(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    config = LoggingConfig(tensorboard=False, progress="none", token_bytes=0)
    with closing(RunLog(config, folder, steps=4)) as log:
        log.trial_ended(a_rollout("early", RolloutStatus.DONE))
        assert now(folder) is None
        log.phase(3, "sampling", 8)
        log.trial_ended(a_rollout("a", RolloutStatus.DONE))
        log.trial_ended(a_rollout("b", RolloutStatus.FAILED, "http://user:hunter2@agent:9 refused"))
        shown = now(folder)
        assert (shown["step"], shown["phase"], shown["trials"]) == (3, "sampling", 8)
        assert (shown["ended"], shown["failed"], shown["groups"]) == (2, 1, None)
        assert shown["errors"] == [{"trial_id": "b", "error": "http://agent:9 refused"}]
        log.phase(3, "training")
        shown = now(folder)
        assert (shown["phase"], shown["ended"], shown["failed"]) == ("training", 0, 0)
        assert len(shown["errors"]) == 1
    assert now(folder) is None
    assert not list(folder.path.glob(".now*"))


def test_groups_of_the_next_batch_are_shown_if_the_producer_reports_them(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    config = LoggingConfig(tensorboard=False, progress="none", token_bytes=0)
    producer: Any = SimpleNamespace(production=Production(3, 8, 5, max_staleness=2))
    with closing(RunLog(config, folder, steps=4)) as log:
        reports_nothing: Any = SimpleNamespace()
        log.follow(reports_nothing)
        log.phase(1, "sampling")
        assert now(folder)["groups"] is None
        log.follow(producer)
        log.phase(1, "sampling")
        assert now(folder)["groups"] == {
            "ready": 3,
            "needed": 8,
            "running": 5,
            "max_staleness": 2,
        }


def test_errors_are_bounded(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    config = LoggingConfig(tensorboard=False, progress="none", token_bytes=0)
    with closing(RunLog(config, folder, steps=4)) as log:
        log.phase(1, "sampling")
        for n in range(KEPT_ERRORS + 3):
            log.trial_ended(a_rollout(str(n), RolloutStatus.FAILED, "x" * 10_000))
        errors = now(folder)["errors"]
    assert [each["trial_id"] for each in errors] == [str(n) for n in range(3, KEPT_ERRORS + 3)]
    assert {len(each["error"]) for each in errors} == {ERROR_CHARS}


def test_file_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = RunFolder.create(tmp_path / "run")
    (folder.path / "now.json").mkdir()
    config = LoggingConfig(tensorboard=False, progress="none", token_bytes=0)
    with closing(RunLog(config, folder, steps=4)) as log:
        log.phase(1, "sampling")
        log.trial_ended(a_rollout("a", RolloutStatus.DONE))
    said = [record.message for record in caplog.records if "now.json" in record.message]
    assert len(said) == 1
    assert "cannot be written, so Now is empty" in said[0]


def test_error_of_an_agent_with_half_a_character_can_be_sent(tmp_path: Path) -> None:
    file = NowFile(tmp_path / "now.json")
    file.begin(1, "sampling")
    file.trial(a_rollout("a", RolloutStatus.FAILED, "agent said \ud800"))
    written = json.loads((tmp_path / "now.json").read_text())
    assert written["errors"] == [{"trial_id": "a", "error": "agent said ?"}]


VALID: dict[str, Any] = {
    "step": 1,
    "phase": "sampling",
    "started_at": 1.5,
    "trials": 0,
    "ended": 0,
    "failed": 0,
    "groups": None,
    "errors": [],
}


def test_file_of_another_program_is_left_out(tmp_path: Path) -> None:
    fields: dict[str, Any] = {
        "step": 10**30,
        "errors": None,
        "phase": 5,
        "groups": {},
        "more": "x" * NOW_BYTES,
    }
    foreign = [json.dumps(VALID | {name: value}) for name, value in fields.items()]
    deep = '{"step": ' + "[" * 100_000 + "]" * 100_000 + "}"
    for text in ("[]", "{}", '{"step": 1}', "{", deep, *foreign):
        (tmp_path / "now.json").write_text(text)
        assert RecordedRun(tmp_path).stamps()["now"] is None, text[:80]
    (tmp_path / "now.json").write_text(json.dumps(VALID | {"phase": "x" * 9_999, "more": "\ud800"}))
    shown = now_of(tmp_path)
    assert shown == VALID | {"phase": "x" * MAX_CHARS}
