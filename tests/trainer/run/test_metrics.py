"""Metrics are written to every sink; an unusable sink is refused before anything starts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import mlflow
import pytest
import wandb

from trainer.errors import ConfigError
from trainer.run.folder import RunFolder
from trainer.run.log import LoggingConfig, RunLog
from trainer.run.metrics import (
    JsonlSink,
    MetricsLog,
    MlflowSink,
    TensorBoardSink,
    Transcript,
    WandbSink,
)


def test_metrics_of_a_step_are_one_line_of_valid_json(tmp_path: Path) -> None:
    log = MetricsLog([JsonlSink(tmp_path / "m.jsonl")], print)
    log.log(1, {"reward/mean": 0.5, "advantage/max": float("nan")})
    line = json.loads((tmp_path / "m.jsonl").read_text())
    assert line["step"] == 1
    assert line["reward/mean"] == 0.5
    assert line["advantage/max"] is None
    log.close()


def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = MetricsLog([TensorBoardSink(tmp_path / "tb")], print)
    for step in (1, 2):
        log.log(step, {"reward/mean": step / 4})
    log.close()
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]


@pytest.mark.parametrize(
    ("sink", "key"),
    [(WandbSink, "logging.wandb_project"), (MlflowSink, "logging.mlflow_experiment")],
)
def test_logger_that_is_not_installed_is_refused_with_its_key(
    sink: type[WandbSink] | type[MlflowSink], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, key.removeprefix("logging.").partition("_")[0], None)
    with pytest.raises(ConfigError, match=key):
        sink("project", "run", {})


def test_mlflow_gets_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tmp_path.as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    log = MetricsLog([MlflowSink("experiment", "run", {"rollout": {"group_size": 3}})], print)
    for step in (1, 2):
        log.log(step, {"reward/mean": step / 4})
    log.close()
    (config,) = tmp_path.glob("*/*/artifacts/config.json")
    assert json.loads(config.read_text()) == {"rollout": {"group_size": 3}}
    (series,) = tmp_path.glob("*/*/metrics/reward/mean")
    lines = [line.split()[1:3] for line in series.read_text().splitlines()]
    assert lines == [["0.25", "1"], ["0.5", "2"]]


@pytest.mark.slow
def test_resumed_run_continues_its_runs_at_mlflow_and_wandb(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlflow").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    offline_wandb(tmp_path, monkeypatch)
    config = LoggingConfig(
        wandb_project="project", mlflow_experiment="experiment", tensorboard=False, progress="none"
    )
    folders = [RunFolder.create(tmp_path / part / "run") for part in ("one", "other")]
    for folder, first in ((folders[0], 1), (folders[1], 1), (folders[0], 3)):
        log = RunLog(config, folder, steps=4, saved_step=first - 1)
        for step in (first, first + 1):
            log.step(step, {"reward/mean": step / 4}, [])
        log.close()
    wandb.teardown()
    one, other = (folder.read_summary()["tracking"] for folder in folders)
    assert one["mlflow"] != other["mlflow"]
    assert one["wandb"] != other["wandb"]
    recorded = {
        path.parent.parent.name: path for path in tmp_path.glob("mlflow/*/*/metrics/reward")
    }
    assert recorded.keys() == {one["mlflow"], other["mlflow"]}
    lines = (recorded[one["mlflow"]] / "mean").read_text().splitlines()
    assert [line.split()[2] for line in lines] == ["1", "2", "3", "4"]
    parts = [path.name for path in tmp_path.glob("wandb/offline-run-*/run-*.wandb")]
    assert sorted(parts) == sorted(f"run-{tracked['wandb']}.wandb" for tracked in (one, one, other))


def test_service_gets_the_configuration_without_its_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlflow").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    config = LoggingConfig(mlflow_experiment="experiment", tensorboard=False, progress="none")
    settings = {"engine": {"urls": ["http://:hunter2@gpu:8001"], "env": {"HF_TOKEN": "hunter2"}}}
    RunLog(config, RunFolder.create(tmp_path / "run"), steps=1, resolved=settings).close()
    (sent,) = tmp_path.glob("mlflow/*/*/artifacts/config.json")
    assert json.loads(sent.read_text())["engine"] == {"urls": ["http://gpu:8001"], "env": "hidden"}


def test_missing_mlflow_run_is_refused_with_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tmp_path.as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    with pytest.raises(ConfigError, match=r"logging\.mlflow_experiment=e: .* not found"):
        MlflowSink("e", "run", {}, run_id="0123456789abcdef0123456789abcdef")


def offline_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MODE", "offline"), ("DIR", str(tmp_path)), ("SILENT", "true")):
        monkeypatch.setenv(f"WANDB_{name}", value)


def test_wandb_gets_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offline_wandb(tmp_path, monkeypatch)
    sink = WandbSink("project", "run", {"rollout": {"group_size": 3}})
    log = MetricsLog([sink], print)
    log.log(7, {"reward/mean": 0.15625})
    log.close()
    wandb.teardown()  # wandb's service writes the end of the file when it ends
    (recorded,) = tmp_path.glob(f"wandb/offline-run-*/run-{sink.run_id}.wandb")
    content = recorded.read_bytes()
    assert b"reward/mean" in content
    assert b"0.15625" in content
    assert b"group_size" in content


TRANSCRIPTS = (
    Transcript("sum-17-x", "sum-17 · reward 1.000", "user: 12 + 30?\nassistant: 42"),
    Transcript("a/../b", "b · reward -", "The session is no longer in sessions.db."),
)


def test_mlflow_gets_the_report_and_the_transcripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    (page := tmp_path / "report.html").write_text("<h1>run</h1>")
    sink = MlflowSink("experiment", "run", {})
    sink.report(page, TRANSCRIPTS)
    sink.close()
    artifacts = mlflow.MlflowClient().list_artifacts(sink.run_id, "transcripts")
    names = [each.path for each in artifacts]
    assert names == ["transcripts/a_.._b.txt", "transcripts/sum-17-x.txt"]
    read = mlflow.artifacts.load_text(f"runs:/{sink.run_id}/transcripts/sum-17-x.txt")
    assert read == "sum-17 · reward 1.000\n\nuser: 12 + 30?\nassistant: 42\n"
    assert mlflow.artifacts.load_text(f"runs:/{sink.run_id}/report.html") == "<h1>run</h1>"


@pytest.mark.slow
def test_wandb_gets_the_report_and_the_transcripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offline_wandb(tmp_path, monkeypatch)
    (page := tmp_path / "report.html").write_text("<h1>run</h1>")
    sink = WandbSink("project", "run", {})
    sink.log(1, {"reward/mean": 0.5})
    sink.report(page, TRANSCRIPTS)
    sink.close()
    wandb.teardown()
    media = next(tmp_path.glob("wandb/offline-run-*/files/media"))
    (report,) = media.glob("html/report_*.html")
    assert report.read_text() == "<h1>run</h1>"
    (table,) = media.glob("table/transcripts_*.table.json")
    read = json.loads(table.read_text())
    assert read["columns"] == ["trial", "facts", "transcript"]
    assert read["data"] == [[each.trial_id, each.facts, each.text] for each in TRANSCRIPTS]
    (recorded,) = tmp_path.glob(f"wandb/offline-run-*/run-{sink.run_id}.wandb")
    content = recorded.read_bytes()
    assert report.name.encode() in content
    assert table.name.encode() in content


def test_service_that_cannot_be_reached_at_the_end_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlflow").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    config = LoggingConfig(mlflow_experiment="experiment", tensorboard=False, progress="plain")
    log = RunLog(config, RunFolder.create(tmp_path / "run"), steps=1)
    log.report(tmp_path / "missing" / "report.html", TRANSCRIPTS)
    log.close()
    assert "warning: report.html could not be sent to MLflow: " in capsys.readouterr().out
