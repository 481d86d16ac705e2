"""What a report says first, from the lines of a run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from agent_loop.producers.trial_list import TrialLine
from tests.trainer.extras.report.written import evaluation, report_text, trial, write_run

CONFIG = {
    "model": {"path": "models/small"},
    "remote_agent": {"python": {"target": "agent.py:run"}},
    "data": {"train_files": ["orders.jsonl"]},
    "algorithm": {"preset": "grpo"},
    "rollout": {"groups_per_step": 4, "group_size": 8},
    "trainer": {"steps": 20},
}


def test_significant_gain_is_said_with_intervals(tmp_path: Path) -> None:
    trials = [trial(f"t{n}", 0, 0.0) for n in range(8)]
    trials += [trial(f"o{n}", 5, 1.0, kind="train", group="g") for n in range(3)]
    trials += [trial(f"t{n}", 20, 1.0) for n in range(8)]
    results = {"before": evaluation(0, 0.0, 0.0, 0.32), "after": evaluation(20, 1.0, 0.68, 1.0)}
    summary = {"eval": results, "steps": 20, "wall_s": 7200, "machine": "2 CPU cores"}
    text = report_text(write_run(tmp_path / "run", trials=trials, summary=summary, config=CONFIG))
    assert "<h1>Held-out success rose from 0 % to 100 %</h1>" in text
    assert (
        "models/small was trained as the policy of the agent agent.py:run on 3 different tasks of "
        "orders.jsonl with grpo, in 20 steps of 4 groups of 8 rollouts. The run took 2.0 h on 2 "
        "CPU cores." in text
    )
    assert "solved 0 % (95 % interval 0 % to 32 %) at step 0 and 100 % (95 % interval" in text
    assert "8 got better and 0 got worse. The difference is significant" in text
    assert "p = 0.0078" in text


def test_agents_and_tasks_are_named_whatever_they_are(tmp_path: Path) -> None:
    def said(name: str, **config: object) -> str:
        folder = write_run(tmp_path / name, config={"model": {"path": "m"}, **config})
        return report_text(folder).partition("m was trained")[2].partition(" with ")[0]

    command = {"command": {"argv": ["python", "solve.py"]}}
    assert said("1", remote_agent=command) == " as the policy of the agent python solve.py"
    agents = {name: {"weight": 1} for name in ("a", "b", "c", "d")}
    assert said("2", agents=agents) == " as the policy of the agent a, b, c and 1 more"
    files = {"train_sources": {"sums": {"limit": 3}, "orders": {"limit": 4}}}
    assert said("3", data=files) == " on orders, sums"


def test_difference_of_few_tasks_is_not_called_significant(tmp_path: Path) -> None:
    trials = [trial(f"t{n}", 0, 0.0) for n in range(5)]
    trials += [trial(f"t{n}", 20, 1.0) for n in range(5)]
    results = {"before": evaluation(0, 0.0, 0.0, 0.43), "after": evaluation(20, 1.0, 0.57, 1.0)}
    text = report_text(write_run(tmp_path / "run", trials=trials, summary={"eval": results}))
    assert "no significant difference</h1>" in text
    assert "The difference is not significant (exact sign test, p = 0.062)" in text


def test_loss_of_success_is_said(tmp_path: Path) -> None:
    trials = [trial(f"t{n}", 0, 1.0) for n in range(8)]
    trials += [trial(f"t{n}", 20, 0.0) for n in range(8)]
    results = {"before": evaluation(0, 1.0, 0.68, 1.0), "after": evaluation(20, 0.0, 0.0, 0.32)}
    text = report_text(write_run(tmp_path / "run", trials=trials, summary={"eval": results}))
    assert "<h1>Held-out success fell from 100 % to 0 %</h1>" in text
    assert "\N{MINUS SIGN}100 points" in text


def test_evaluations_without_a_task_in_common_are_not_compared(tmp_path: Path) -> None:
    trials = [trial("a", 0, 0.0), trial("b", 9, 1.0)]
    results = {"before": evaluation(0, 0.0, 0.0, 0.9), "after": evaluation(9, 1.0, 0.1, 1.0)}
    text = report_text(write_run(tmp_path / "run", trials=trials, summary={"eval": results}))
    assert "No task was judged in both evaluations" in text
    assert "points" not in text


def test_imitation_reports_its_held_out_loss(tmp_path: Path) -> None:
    metrics = [{"step": n, "sft/held_out_loss": 1 / (n + 1)} for n in range(4)]
    config = {"model": {"path": "m"}, "sft": {"sessions": ["runs/teacher"]}}
    folder = write_run(tmp_path / "run", metrics=metrics, summary={"steps": 3}, config=config)
    text = report_text(folder)
    assert "<h1>Held-out loss went from 1 to 0.25</h1>" in text
    assert "m was trained by imitation of answers recorded in runs/teacher, in 3 steps" in text


@pytest.mark.parametrize(
    ("metric", "title"),
    [
        ("sft/held_out_loss", "Held-out loss was 0.5"),
        ("rollout/success", "Success in training was 50 % (not held out)"),
    ],
)
def test_a_metric_with_one_value_did_not_go_anywhere(
    tmp_path: Path, metric: str, title: str
) -> None:
    folder = write_run(tmp_path / "run", metrics=[{"step": 4, metric: 0.5}], summary={"steps": 4})
    assert f"<h1>{title}</h1>" in report_text(folder)


def test_run_that_was_killed_says_so(tmp_path: Path) -> None:
    summary = {"status": "running", "steps": 3}
    text = report_text(write_run(tmp_path / "run", summary=summary, config=CONFIG))
    assert "<h1>The run&#x27;s process was killed after 3 of 20 steps.</h1>" in text


@pytest.mark.parametrize(
    "summary",
    [
        {"eval": {"before": {"success": 0.5}, "after": {"success": 0.7}}},
        {"eval": {"before": "x", "after": [1]}},
        {"eval": [1]},
        {"status": ["done"]},
        {"status": {"a": 1}},
    ],
)
def test_summary_of_another_trainer_is_read_as_far_as_possible(
    tmp_path: Path, summary: dict[str, Any]
) -> None:
    trials = [trial("t", 1, 1.0, trial_id="\ud800")]
    assert "<h1>" in report_text(write_run(tmp_path / "run", trials=trials, summary=summary))


def test_nothing_but_a_configuration_is_enough(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", config={"model": None})
    for file in (folder.metrics, folder.trials_log, folder.summary):
        file.unlink()
    text = report_text(folder)
    assert "<h1>Run run</h1>" in text
    assert "There was no evaluation on held-out tasks." in text


def test_evaluation_without_training_is_not_called_training(tmp_path: Path) -> None:
    lines = [
        asdict(TrialLine(f"t{n}", "s", 0, f"t{n}-x", "done", float(n < 6), 2)) for n in range(8)
    ]
    folder = write_run(tmp_path / "run", trials=lines, config=CONFIG)
    folder.summary.unlink()
    text = report_text(folder)
    assert "<h1>Held-out success: 75 %</h1>" in text
    assert "models/small was evaluated as the policy of the agent agent.py:run.</p>" in text
    assert "On 8 held-out tasks the policy succeeds in 75 % (95 % interval 41 % to 93 %)." in text
    assert "trained" not in text
