"""Which run a start of the trainer begins or continues."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainer import start
from trainer.checkpoint import FORMAT, Saved
from trainer.cli import main
from trainer.errors import CheckpointError, ConfigError
from trainer.run.folder import RunFolder


@pytest.fixture
def config(tiny_model: Path, tmp_path: Path) -> Path:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"task_id": "a", "prompt": "say a"}) + "\n")
    settings = {
        "model": {"path": str(tiny_model)},
        "data": {"train_files": [str(tasks)]},
        "remote_agent": {"command": {"argv": ["true"]}},
        "trainer": {"run_dir": str(tmp_path / "run"), "device": "cpu"},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.fixture
def run_until(monkeypatch: pytest.MonkeyPatch, config: Path) -> Any:
    """Starts a run that only writes its status and a checkpoint; returns its folder and the step
    that it continued from."""

    def run(status: str, *overrides: str) -> tuple[str, int]:
        started: list[tuple[str, int]] = []

        def scripted(_: start.Parts, folder: RunFolder, saved: Saved | None, *notes: str) -> int:
            print(*notes)
            started.append((folder.path.name, saved.step if saved else 0))
            folder.write_summary({"status": status})
            saved_here = folder.checkpoints / "step-000007"
            saved_here.mkdir(exist_ok=True)
            (saved_here / "run.json").write_text(json.dumps({"format": FORMAT}))
            folder.unlock()
            return 0

        monkeypatch.setattr(start, "_run", scripted)
        assert start.begin([config], overrides, {}) == 0
        return started[0]

    return run


@pytest.mark.parametrize("status", ["running", "failed", "stopped"])
def test_same_command_continues_a_run_that_has_not_ended(run_until: Any, status: str) -> None:
    assert run_until(status) == ("run", 0)
    assert run_until(status) == ("run", 7)
    assert run_until("done") == ("run", 7)
    assert run_until("done") == ("run-2", 0)


def test_another_configuration_begins_a_new_run_and_says_which_key_differs(
    run_until: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_until("running")
    assert run_until("running", "optimizer.lr=1e-3") == ("run-2", 0)
    said = capsys.readouterr().out
    assert "its configuration is another one (optimizer.lr): this is a new run" in said
    assert f"add trainer.resume={tmp_path / 'run'}" in said
    assert run_until("running", "optimizer.lr=1e-3") == ("run-2", 7)


def test_start_with_resume_never_begins_a_new_run(run_until: Any) -> None:
    run_until("running", "trainer.resume=never")
    assert run_until("running", "trainer.resume=never") == ("run-2", 0)


def test_resume_of_a_folder_continues_its_run_with_the_given_configuration(
    run_until: Any, tmp_path: Path
) -> None:
    run_until("done")
    words = f"trainer.resume={tmp_path / 'run'}", "trainer.steps=200"
    assert run_until("running", *words) == ("run", 7)
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["trainer"]["steps"] == 200


def test_resume_of_a_folder_without_a_run_is_refused(run_until: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run's folder"):
        run_until("done", f"trainer.resume={tmp_path / 'none'}")


def test_start_does_not_touch_a_run_that_is_running(run_until: Any, tmp_path: Path) -> None:
    run_until("running")
    running = RunFolder.open(tmp_path / "run")
    running.lock()
    assert run_until("running") == ("run-2", 0)
    running.unlock()


def test_a_checkpoint_of_an_earlier_layout_is_refused_with_what_to_do(
    run_until: Any, tmp_path: Path
) -> None:
    run_until("running")
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000007"
    (checkpoint / "run.json").write_text('{"step": 7, "version": 7}')
    with pytest.raises(CheckpointError, match=r"format 1; this version reads 2") as caught:
        run_until("running")
    assert f"model.path={checkpoint}/model trainer.resume=never" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "level"), [(["--log-level", "debug"], "debug"), ([], "warning")]
)
def test_log_level_of_the_command_line_is_that_of_the_run(
    config: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], level: str
) -> None:
    levels: list[str] = []

    async def nothing(*_: object) -> str:
        return "done"

    monkeypatch.setattr(start, "_under_signals", nothing)
    monkeypatch.setattr(start, "hide_memory", lambda: None)  # of the test's own process
    monkeypatch.setattr(start.logs, "set_up", lambda _, least: levels.append(least))
    assert main(["--config", str(config), *arguments]) == 0
    assert levels == [level]
