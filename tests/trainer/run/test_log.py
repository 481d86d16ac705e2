"""What the summary of a run keeps for its report."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

from agent_loop.evaluator import EvalConfig, EvalReport, score
from agent_loop.records import Group, Rollout, RolloutStatus, Task
from trainer.run.folder import RunFolder
from trainer.run.log import WARNINGS, LoggingConfig, RunLog, evaluation_summary


def test_warnings_are_counted_and_a_resumed_run_keeps_them(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    config = LoggingConfig(tensorboard=False, progress="none", token_bytes=0)
    for times in (2, 1):
        with closing(RunLog(config, folder, steps=4, machine="2 CPU cores")) as log:
            for _ in range(times):
                log.progress.say("warning: engine-0 ended; starting another")
            log.progress.say("an ordinary line")
            log.finish("failed", error="TrainerError: no engine")
    summary = folder.read_summary()
    assert summary["warnings"] == {"engine-0 ended; starting another": 3}
    assert summary["machine"] == "2 CPU cores"
    assert summary["error"] == "TrainerError: no engine"


def test_warnings_and_errors_of_trials_are_kept_without_secrets(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    config = LoggingConfig(tensorboard=False, progress="none", token_bytes=0)
    error = "no answer from http://user:hunter2@agent:9"
    failed = Rollout("t-1", Task("t", {}), RolloutStatus.FAILED, None, error=error)
    with closing(RunLog(config, folder, steps=4)) as log:
        log.progress.say(f"warning: {error}")
        log.step(1, {}, [Group("g", failed.task, (failed,))])
    assert folder.read_summary()["warnings"] == {"no answer from http://agent:9": 1}
    assert json.loads(folder.trials_log.read_text())["error"] == "no answer from http://agent:9"


def test_number_of_different_warnings_is_bounded(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    config = LoggingConfig(tensorboard=False, progress="none", token_bytes=0)
    with closing(RunLog(config, folder, steps=4)) as log:
        for n in range(WARNINGS + 7):
            log.progress.say(f"warning: {n}" + "x" * 10_000)
        log.finish("done")
    warnings = folder.read_summary()["warnings"]
    assert len(warnings) == WARNINGS + 1
    assert warnings["other warnings"] == 7
    assert max(map(len, warnings)) == 500


def test_tasks_of_two_sources_with_one_id_are_two_tasks_of_the_reward_interval() -> None:
    tasks = [Task("1", {}, source) for source in ("easy", "hard")]
    rollouts = [
        Rollout(task.source, task, RolloutStatus.DONE, reward)
        for task, reward in zip(tasks, (1.0, 0.0), strict=True)
    ]
    groups = [Group(each.trial_id, each.task, [each]) for each in rollouts]
    report = EvalReport(0, score(groups, EvalConfig()), {}, rollouts)
    assert evaluation_summary(1, report)["reward_interval"] == (0.0, 1.0)
