"""What a report says went wrong, with numbers and examples."""

from __future__ import annotations

from pathlib import Path

from tests.trainer.extras.report.written import report_data, trial, write_run
from trainer.extras.report.trials import MAX_CAUSES


def test_failures_are_counted_by_cause_with_an_example(tmp_path: Path) -> None:
    trials = [
        trial(f"t{n}", 1, None, kind="train", status="failed", error=f"timeout after {n} s\nmore")
        for n in range(30)
    ]
    trials += [trial("ok", 1, 1.0, kind="train"), trial("cut", 1, 0.0, status="truncated")]
    found = report_data(write_run(tmp_path / "run", trials=trials))["troubles"]
    assert [(each["count"], each["what"]) for each in found] == [
        (30, "failed trials: timeout after # s"),
        (1, "truncated trials"),
    ]
    assert found[0]["of"].startswith("of 32 trials")
    assert found[0]["example"] == "t0-1: timeout after 0 s\nmore"


def test_causes_are_bounded_and_the_others_counted_together(tmp_path: Path) -> None:
    names = [chr(ord("a") + n // 26) + chr(ord("a") + n % 26) for n in range(60)]
    trials = [trial("t", 1, None, status="failed", error=f"cause {name}") for name in names]
    found = report_data(write_run(tmp_path / "run", trials=trials))["troubles"]
    assert len(found) == MAX_CAUSES + 1
    assert found[0]["what"] == "failed trials: other causes"
    assert sum(each["count"] for each in found) == 60


def test_steps_without_signal_staleness_warnings_and_logs_are_listed(tmp_path: Path) -> None:
    metrics = [
        {"step": n, "signal/steps_without": float(n > 2), "staleness/max": float(n)}
        for n in range(1, 5)
    ]
    summary = {
        "error": "TrainingError: 2 steps in a row without a signal",
        "warnings": {"engine-0 ended with exit code 9; starting another": 3},
    }
    config = {"model": {"path": "m"}, "rollout": {"max_staleness": 3}}
    folder = write_run(tmp_path / "run", metrics=metrics, summary=summary, config=config)
    folder.logs.mkdir()
    (folder.logs / "engine-0.log").write_text("INFO x\nINFO WARNING y\n(Core) ERROR 11-22 boom\n")
    (folder.logs / "proxy.log").write_text(
        "12:00 WARNING proxy.routing.router engine failed its check\n"
    )
    found = report_data(folder)["troubles"]
    assert [(each["count"], each["what"], each["example"].strip()) for each in found] == [
        (1, "error ended the run", "TrainingError: 2 steps in a row without a signal"),
        (3, "warnings", "engine-0 ended with exit code 9; starting another"),
        (2, "steps without a signal", "step 3"),
        (4, "updates of staleness at most", "step 4"),
        (1, "errors in logs/engine-0.log", "(Core) ERROR 11-22 boom"),
        (
            *(1, "warnings and errors in logs/proxy.log"),
            "12:00 WARNING proxy.routing.router engine failed its check",
        ),
    ]


def test_an_engine_that_was_stopped_did_not_go_wrong(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", metrics=[{"step": 1, "signal/steps_without": 0.0}])
    folder.logs.mkdir()
    log = folder.logs / "engine-0.log"
    stopped = (
        "(EngineCore pid=9) INFO 11-29 [core.py:1499] [shutdown] EngineCore: exiting busy loop\n"
        "(APIServer pid=8) INFO 11-29 [core_client.py:770] [shutdown] MPClient: start timeout=0s\n"
        "(APIServer pid=8) ERROR 11-29 [async_llm.py:906] Traceback (most recent call last):\n"
        "(APIServer pid=8) ERROR 11-29 [async_llm.py:906] EngineDeadError: an issue\n"
    )
    log.write_text(stopped)
    assert report_data(folder)["troubles"] == []
    log.write_text(f"{stopped}(APIServer pid=18) ERROR 11-29 [async_llm.py:906] started again\n")
    (again,) = report_data(folder)["troubles"]
    assert again["count"] == 1
    assert "started again" in again["example"]
    log.write_text(f"(EngineCore pid=9) ERROR 11-29 [core.py:1] out of memory\n{stopped}")
    (first,) = report_data(folder)["troubles"]
    assert "out of memory" in first["example"]


def test_secrets_that_errors_and_logs_repeat_are_hidden(tmp_path: Path) -> None:
    error = "no answer from http://user:hunter2@agent:9; Authorization: Basic hunter2"
    trials = [trial("t", 1, None, status="failed", error=error), trial("u", 1, 1.0, error=error)]
    summary = {"error": f"EngineError: {error}", "warnings": {f"{error} again": 1}}
    folder = write_run(tmp_path / "run", trials=trials, summary=summary)
    folder.logs.mkdir()
    (folder.logs / "proxy.log").write_text("12:00 ERROR x api_key=hunter2\n")
    data = report_data(folder)
    assert "no answer from http://agent:9; Authorization: hidden" in str(data["troubles"])
    assert len(data["troubles"]) == 4
    assert data["pairs"]
    assert "hunter2" not in str(data)


def test_run_without_trouble_has_none(tmp_path: Path) -> None:
    metrics = [{"step": 1, "signal/steps_without": 0.0, "staleness/max": 1.0}]
    config = {"model": {"path": "m"}, "rollout": {"max_staleness": 1}}
    folder = write_run(
        tmp_path / "run", trials=[trial("t", 1, 1.0)], metrics=metrics, config=config
    )
    assert report_data(folder)["troubles"] == []
