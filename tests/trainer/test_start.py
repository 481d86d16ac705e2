"""Which run a start of the trainer begins or continues."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch
import yaml

from proxy.machine import logs
from trainer import start
from trainer.checkpoint import FORMAT, Saved
from trainer.cli import main
from trainer.errors import CheckpointError, ConfigError, TrainerError
from trainer.extras import report
from trainer.extras.mirror import CheckpointMirror
from trainer.mains.registry import Parts
from trainer.run.folder import RunFolder
from trainer.run.log import RunLog
from trainer.run.state_folder import write_state
from trainer.settings.sources import load
from trainer.settings.values import Sources


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

        def scripted(_: Parts, folder: RunFolder, saved: Saved | None, *notes: str) -> int:
            print(*notes)
            started.append((folder.path.name, saved.step if saved else 0))
            folder.write_summary({"status": status})
            saved_here = folder.checkpoints / "step-000007"
            if not saved_here.exists():
                write_state({"a": torch.zeros(1)}, saved_here / "state")
            (saved_here / "run.json").write_text(json.dumps({"format": FORMAT}))
            folder.unlock()
            return 0

        monkeypatch.setattr(start, "_run", scripted)
        assert start.begin(Sources([config], overrides, {})) == 0
        return started[0]

    return run


@pytest.mark.parametrize("status", ["running", "failed", "stopped"])
def test_same_command_continues_a_run_that_has_not_ended(run_until: Any, status: str) -> None:
    assert run_until(status) == ("run", 0)
    assert run_until(status) == ("run", 7)
    assert run_until("done") == ("run", 7)
    assert run_until("done") == ("run-2", 0)


def test_damaged_newest_checkpoint_is_said_and_the_one_before_it_continued(
    run_until: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_until("running")
    folder = tmp_path / "run" / "checkpoints"
    shutil.copytree(folder / "step-000007", folder / "step-000009")
    (folder / "step-000009" / "state" / ".metadata").write_bytes(b"")
    assert run_until("running") == ("run", 7)
    assert "step-000009 is damaged and not used: " in capsys.readouterr().out


def test_another_configuration_begins_a_new_run_and_says_which_key_differs(
    run_until: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_until("running")
    assert run_until("running", "optimizer.lr=1e-3") == ("run-2", 0)
    said = capsys.readouterr().out
    assert "its configuration is another one (optimizer.lr): this is a new run" in said
    assert f"add trainer.resume={tmp_path / 'run'}" in said
    assert run_until("running", "optimizer.lr=1e-3") == ("run-2", 7)


def test_run_of_a_release_with_fewer_keys_is_continued(
    run_until: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_until("running")
    written = tmp_path / "run" / "config.yaml"
    values = yaml.safe_load(written.read_text())
    del values["trainer"]["weight_copies"], values["relay"]
    written.write_text(yaml.safe_dump(values))
    assert run_until("running") == ("run", 7)
    assert yaml.safe_load(written.read_text())["trainer"]["weight_copies"] == 1
    written.write_text(yaml.safe_dump(values))
    assert run_until("running", "trainer.ranks=2", "trainer.weight_copies=2") == ("run-2", 0)
    assert "(trainer.ranks, trainer.weight_copies)" in capsys.readouterr().out


def test_run_is_continued_where_the_plan_decides_otherwise(run_until: Any, tmp_path: Path) -> None:
    run_until("running")
    written = tmp_path / "run" / "config.yaml"
    values = yaml.safe_load(written.read_text())
    values["model"]["gradient_checkpointing"] = True  # as planned for a smaller GPU
    written.write_text(yaml.safe_dump(values))
    assert run_until("running") == ("run", 7)
    assert yaml.safe_load(written.read_text())["model"]["gradient_checkpointing"] is False
    assert run_until("running", "model.gradient_checkpointing=true") == ("run-2", 0)


def test_configuration_that_a_check_prints_can_be_loaded(config: Path, tmp_path: Path) -> None:
    printed = tmp_path / "printed.yaml"
    printed.write_text(start.check_only(Sources([config], ["model.activation_offload=true"], {})))
    assert load([printed], [], {}).model.gradient_checkpointing
    assert yaml.safe_load(start.check_only(Sources([printed], [], {}))) == yaml.safe_load(
        printed.read_text()
    )


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
    monkeypatch.setattr(logs, "set_up", lambda _, least: levels.append(least))
    assert main(["--config", str(config), *arguments]) == 0
    assert levels == [level]


class ExpiredToken(Exception):
    """As the clients of artifact stores raise it: not an OSError, nor one of MLflow's."""


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Makes a function of a module fail, with a secret and two lines in its error. Runs log to
    MLflow and do not train."""

    async def nothing(*_: object) -> str:
        return "done"

    monkeypatch.setattr(start, "_under_signals", nothing)
    monkeypatch.setattr(start, "hide_memory", lambda: None)  # of the test's own process
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlflow").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")

    def fail(module: object, name: str) -> None:
        def fail_now(*_: object) -> None:
            raise ExpiredToken("PutObject\nhttp://me:hunter2@store/b?token=hunter2 is refused")

        monkeypatch.setattr(module, name, fail_now)

    end_run = mlflow.end_run
    yield fail
    end_run()


@pytest.fixture
def closings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happened to the log of a run."""
    noted: list[str] = []
    close = RunLog.close

    def noting(log: RunLog) -> None:
        noted.append("begun")
        close(log)
        noted.append("ended")

    monkeypatch.setattr(RunLog, "close", noting)
    return noted


SHOWN_ERROR = "ExpiredToken: PutObject http://store/b?token=hidden is refused"
LOGGED = ("logging.mlflow_experiment=e", "logging.progress=plain", "logging.tensorboard=false")


@pytest.mark.parametrize(
    ("module", "name", "warning"),
    [
        (mlflow, "log_artifact", "report.html could not be sent to MLflow"),
        (mlflow, "end_run", "MLflow could not be closed"),
        (report, "write_report", "report.html could not be written"),
    ],
)
def test_run_that_is_done_ends_so_whatever_its_report_or_a_service_raises(
    config: Path,
    tmp_path: Path,
    fails: Any,
    closings: list[str],
    capsys: pytest.CaptureFixture[str],
    module: object,
    name: str,
    warning: str,
) -> None:
    fails(module, name)
    assert start.begin(Sources([config], LOGGED, {})) == 0
    said = capsys.readouterr()
    warnings = [line for line in said.out.splitlines() if line.startswith("warning: ")]
    assert warnings == [f"warning: {warning}: {SHOWN_ERROR}"]
    assert "hunter2" not in said.out + said.err
    folder = RunFolder.open(tmp_path / "run")
    assert folder.read_summary()["status"] == "done"
    assert closings == ["begun", "ended"]
    assert not folder.is_running


def test_failed_run_ends_with_its_own_error_whatever_its_report_raises(
    config: Path,
    tmp_path: Path,
    fails: Any,
    closings: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def failing(*_: object) -> str:
        raise TrainerError("no engine is left")

    monkeypatch.setattr(start, "_under_signals", failing)
    for module, name in ((report, "write_report"), (mlflow, "end_run")):
        fails(module, name)
    with pytest.raises(TrainerError, match="no engine is left"):
        start.begin(Sources([config], LOGGED, {}))
    folder = RunFolder.open(tmp_path / "run")
    summary = folder.read_summary()
    assert (summary["status"], summary["error"]) == ("failed", "TrainerError: no engine is left")
    assert closings == ["begun", "ended"]
    assert not folder.is_running


def test_run_on_an_empty_disk_continues_from_its_mirror(
    run_until: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"trainer.checkpoint_mirror=file://{tmp_path}/mirror"
    assert run_until("running", url) == ("run", 0)
    run = RunFolder(tmp_path / "run")
    mirror = CheckpointMirror(f"file://{tmp_path}/mirror", keep_last=2)
    mirror.upload(Saved(run.checkpoints / "step-000007", 7), run)
    name = run.run_id
    shutil.rmtree(run.path)
    with pytest.raises(ConfigError, match=r"another configuration \(trainer\.steps\)"):
        run_until("running", url, "trainer.steps=9")
    assert not run.path.exists()
    assert run_until("running", url) == ("run", 7)
    assert f"fetched file://{tmp_path}/mirror, step 7" in capsys.readouterr().out
    assert RunFolder(tmp_path / "run").run_id == name


def test_mirror_is_used_where_no_local_checkpoint_is_whole(
    run_until: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"trainer.checkpoint_mirror=file://{tmp_path}/mirror"
    assert run_until("running", url) == ("run", 0)
    run = RunFolder(tmp_path / "run")
    saved = Saved(run.checkpoints / "step-000007", 7)
    CheckpointMirror(f"file://{tmp_path}/mirror", keep_last=2).upload(saved, run)
    shutil.rmtree(saved.path / "state")
    assert run_until("running", url) == ("run", 7)
    said = capsys.readouterr().out
    assert f"fetched file://{tmp_path}/mirror, step 7" in said
    assert "step-000007 is damaged and not used" in said


def test_fine_tuning_has_no_ledger(config: Path) -> None:
    """Nothing is sampled that could be replayed, and its batches are demonstrations."""
    words = ["trainer.deterministic=true"]
    assert start._has_ledger(load([config], words))
    assert not start._has_ledger(load([config], [*words, "sft.sessions=[x]"]))
    assert not start._has_ledger(load([config], []))


def test_mirror_of_another_run_is_refused(run_until: Any, tmp_path: Path) -> None:
    url = f"trainer.checkpoint_mirror=file://{tmp_path}/mirror"
    assert run_until("running", url) == ("run", 0)
    run = RunFolder(tmp_path / "run")
    mirror = CheckpointMirror(f"file://{tmp_path}/mirror", keep_last=2)
    mirror.upload(Saved(run.checkpoints / "step-000007", 7), run)
    with pytest.raises(ConfigError, match=r"step 7 of another run, and this is a new run"):
        run_until("running", url, "trainer.resume=never")
    (run.path / "run.id").write_text("another")
    with pytest.raises(ConfigError, match=r"and .*run is the run another; give each"):
        run_until("running", url)


def test_newer_copy_of_the_mirror_is_continued(run_until: Any, tmp_path: Path) -> None:
    url = f"trainer.checkpoint_mirror=file://{tmp_path}/mirror"
    assert run_until("running", url) == ("run", 0)
    run = RunFolder(tmp_path / "run")
    newer = run.checkpoints / "step-000009"
    shutil.copytree(run.checkpoints / "step-000007", newer)
    CheckpointMirror(f"file://{tmp_path}/mirror", keep_last=2).upload(Saved(newer, 9), run)
    shutil.rmtree(newer)
    assert run_until("running", url) == ("run", 9)
