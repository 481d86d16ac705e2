"""What a run does at this moment, as the page reads it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from agent_loop.producers.protocol import Production
from agent_loop.records import Rollout, RolloutStatus, Task
from proxy.view.run_folder import RecordedRun
from trainer.run.folder import RunFolder
from trainer.run.log import LoggingConfig, RunLog
from trainer.run.now import ERROR_CHARS, KEPT_ERRORS


def a_rollout(name: str, status: RolloutStatus, error: str | None = None) -> Rollout:
    return Rollout(name, Task("t", {}), status, None, error=error)


def now(folder: RunFolder) -> Any:
    return RecordedRun(folder.path).stamps()["now"]


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
        log.follow(producer)
        log.phase(1, "sampling")
        assert now(folder)["groups"] == {
            "ready": 3,
            "needed": 8,
            "running": 5,
            "max_staleness": 2,
        }
        other: Any = SimpleNamespace()
        log.follow(other)


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


def test_file_of_another_program_is_left_out(tmp_path: Path) -> None:
    for text in ("[]", "{}", '{"step": 1}', "{"):
        (tmp_path / "now.json").write_text(text)
        assert RecordedRun(tmp_path).stamps()["now"] is None
