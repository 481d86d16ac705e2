"""Metrics reach every place; a place that cannot be reached is told before anything starts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import wandb

from trainer.errors import ConfigError
from trainer.metrics import JsonlSink, MetricsLog, MlflowSink, TensorBoardSink, WandbSink
from trainer.progress import Progress


def test_a_step_is_a_line_that_any_json_reader_reads(tmp_path: Path) -> None:
    log = MetricsLog([JsonlSink(tmp_path / "m.jsonl")])
    log.log(1, {"reward/mean": 0.5, "advantage/max": float("nan")})
    line = json.loads((tmp_path / "m.jsonl").read_text())
    assert line["step"] == 1
    assert line["reward/mean"] == 0.5
    assert line["advantage/max"] is None
    log.close()


def test_tensorboard_has_the_same_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = MetricsLog([TensorBoardSink(tmp_path / "tb")])
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
def test_a_logger_that_is_not_installed_names_its_key(
    sink: type[WandbSink] | type[MlflowSink], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, key.removeprefix("logging.").partition("_")[0], None)
    with pytest.raises(ConfigError, match=key):
        sink("project", "run", {})


def test_mlflow_has_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tmp_path.as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    log = MetricsLog([MlflowSink("experiment", "run", {"rollout": {"group_size": 3}})])
    for step in (1, 2):
        log.log(step, {"reward/mean": step / 4})
    log.close()
    (config,) = tmp_path.glob("*/*/artifacts/config.json")
    assert json.loads(config.read_text()) == {"rollout": {"group_size": 3}}
    (series,) = tmp_path.glob("*/*/metrics/reward/mean")
    lines = [line.split()[1:3] for line in series.read_text().splitlines()]
    assert lines == [["0.25", "1"], ["0.5", "2"]]


def test_wandb_has_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MODE", "offline"), ("DIR", str(tmp_path)), ("SILENT", "true")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    log = MetricsLog([WandbSink("project", "run", {"rollout": {"group_size": 3}})])
    log.log(7, {"reward/mean": 0.15625})
    log.close()
    wandb.teardown()  # its service writes the file's end as it ends
    (recorded,) = tmp_path.glob("wandb/offline-run-*/run-run.wandb")
    content = recorded.read_bytes()
    assert b"reward/mean" in content
    assert b"0.15625" in content
    assert b"group_size" in content


def test_plain_progress_is_one_line_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress("plain", steps=20)
    progress.phase(3, "sampling")
    progress.step(3, {"reward/mean": 0.25, "mismatch/logp_abs_mean": 4e-7, "other": 1.0})
    progress.close()
    (line,) = capsys.readouterr().out.splitlines()
    assert "step  3/20" in line
    assert "reward 0.250" in line
    assert "mismatch 4.0e-07" in line


def test_a_terminal_shows_the_phase(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress("rich", steps=20)
    progress.phase(3, "sampling")
    progress.say("a line")
    progress.close()
    assert "a line" in capsys.readouterr().out


def test_no_progress_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress("none", steps=1)
    progress.step(1, {"reward/mean": 1.0})
    assert capsys.readouterr().out == ""
