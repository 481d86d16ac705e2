"""One verdict: console, summary, `status`, page, report and metric say the same of a run."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest
import yaml

from agent_loop.evaluator import EvalConfig, EvalReport, score
from agent_loop.records import Group, Rollout, RolloutStatus, Task
from proxy.extras.view.run_folder import RecordedRun
from proxy.extras.view.runs import RecordedRuns
from proxy.metrics import Metrics
from proxy.run_files.files import replace_file
from trainer.cli import main
from trainer.extras.report import write_report
from trainer.run.folder import RunFolder
from trainer.run.log import LoggingConfig, RunLog

CONFIG = {"eval": {"success_at": 1.0}, "trainer": {"steps": 3}}


def groups(step: int, reward: float) -> list[Group]:
    """Four groups of four rollouts with one reward."""
    made = []
    for g in range(4):
        task = Task(f"t{g}", {})
        rollouts = [Rollout(f"{step}-{g}-{n}", task, RolloutStatus.DONE, reward) for n in range(4)]
        made.append(Group(f"g{step}-{g}", task, rollouts))
    return made


def log_of(folder: RunFolder, progress: str = "none") -> RunLog:
    settings = {"tensorboard": False, "progress": progress, "token_bytes": 0}
    return RunLog(
        LoggingConfig.model_validate(settings), folder, steps=3, resolved=CONFIG, machine="1 core"
    )


def begun(path: Path) -> RunFolder:
    folder = RunFolder.create(path)
    replace_file(folder.config, yaml.safe_dump(CONFIG))
    return folder


def status_of(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    capsys.readouterr()
    assert main(["status", str(folder.path), "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)["verdict"]
    return found


def test_all_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = begun(tmp_path / "run")
    with closing(log_of(folder, "plain")) as log:
        for step in (1, 2, 3):
            log.step(step, {"reward/mean": 0.0}, groups(step, 0.0))
        log.finish("done")
    said = capsys.readouterr().out
    verdict = folder.read_summary()["verdict"]
    assert verdict["verdict"] == "too hard"
    assert said.count("verdict: too hard. In 8 of the last 8 groups") == 1  # not at each step
    assert status_of(folder, capsys) == verdict
    assert RecordedRun(folder.path).summary()["verdict"] == verdict
    report = write_report(folder).page.read_text()
    assert "<strong>too hard</strong>" in report
    assert verdict["sentence"] in report
    metrics = Metrics()
    runs = RecordedRuns([folder.path])
    labels = ("run", "verdict")
    metrics.gauges("run_verdict", "How a run is doing", labels, runs.verdicts, shared=True)
    line = b'agentic_proxy_run_verdict{run="run",verdict="too hard"} 1.0'
    assert line in metrics.exposition()
    assert line in metrics.exposition([metrics.exposition()])  # of two processes of a proxy
    metrics.gauges("run_metric", "Last values", ("run", "metric"), runs.last, shared=True)
    assert b'agentic_proxy_run_metric{metric="reward/mean",run="run"} 0.0' in metrics.exposition()
    assert main(["status", str(folder.path)]) == 0
    printed = capsys.readouterr().out
    assert "done, step 3 of 3" in printed
    assert "agentic-train collect --config" in printed


def test_trials_that_failed_before_a_step_are_in_the_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = begun(tmp_path / "run")
    with closing(log_of(folder)) as log:
        log.phase(1, "sampling", 16)
        for n in range(16):
            trial = f"t-{n}-AbPKSthLiicd"
            error = f"exit code 2; see {folder.path}/trials/{trial}/agent.log"
            failed = Rollout(trial, Task("t", {}), RolloutStatus.FAILED, None, error=error)
            log.trial_ended(failed)
        log.finish("failed", error="ProductionError: no usable rollout in 16 trials")
        log.finish("failed", error="ProductionError: no usable rollout in 16 trials")
    verdict = folder.read_summary()["verdict"]
    assert verdict["verdict"] == "failing"
    assert verdict["cause"] == "exit code 2 (16 of 16 failed trials)"
    assert (
        "16 of 16 trials: exit code 2; the last one is in" in write_report(folder).page.read_text()
    )
    assert len(folder.trials_log.read_text().splitlines()) == 16
    assert status_of(folder, capsys) == verdict


def test_summary_has_no_nan_and_an_evaluation_without_a_judged_trial_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = begun(tmp_path / "run")
    failed = [
        Rollout(f"e{n}", Task(f"e{n}", {}), RolloutStatus.FAILED, None, error="exit code 1")
        for n in range(8)
    ]
    whole = score([Group(r.trial_id, r.task, (r,)) for r in failed], EvalConfig())
    with closing(log_of(folder, "plain")) as log:
        log.evaluation(0, "before", EvalReport(0, whole, {"": whole}, failed))
        log.finish("stopped")
    assert "success unknown, 0 trials of 0 tasks, 8 failed" in capsys.readouterr().out

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = folder.summary.read_text()
    summary = json.loads(text, parse_constant=refuse)
    assert summary["eval"]["before"]["success"] is None
    assert summary["verdict"]["verdict"] == "failing"
    assert (
        "No trial on held-out tasks was judged: 8 failed." in write_report(folder).page.read_text()
    )


def test_steps_without_a_signal_are_no_trouble_of_a_run_that_solved_its_tasks(
    tmp_path: Path,
) -> None:
    for reward, listed in ((1.0, False), (0.0, True)):
        folder = begun(tmp_path / f"run{reward}")
        with closing(log_of(folder)) as log:
            for step in (1, 2, 3):
                metrics = {"reward/mean": reward, "signal/steps_without": float(step)}
                log.step(step, metrics, groups(step, reward))
            log.finish("done")
        assert ("steps without a signal" in write_report(folder).page.read_text()) is listed
