"""The file of a report: its policy, its size, and what foreign content can do in it."""

from __future__ import annotations

import base64
import json
import re
from hashlib import sha256
from pathlib import Path

import pytest

from tests.proxy.extras.view.recording import HOSTILE
from tests.trainer.extras.report.written import evaluation, report_data, trial, write_run
from trainer.extras.report import write_report
from trainer.extras.report.page import EVALUATIONS, SETTINGS
from trainer.run.folder import RunFolder

MAX_BYTES = 6_000_000
SURROGATE = "\ud800"


def test_policy_allows_the_reports_own_script_and_style_alone(tmp_path: Path) -> None:
    text = write_report(write_run(tmp_path / "run")).page.read_text()
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    parts = dict(part.split(maxsplit=1) for part in policy[1].split("; "))
    for name, element in (("script-src", "script"), ("style-src", "style")):
        (content,) = re.findall(f"<{element}>(.*?)</{element}>", text, re.DOTALL)
        digest = base64.b64encode(sha256(content.encode()).digest()).decode()
        assert parts[name] == f"'sha256-{digest}'"
    assert parts["default-src"] == "'none'"
    head = text.partition("<style>")[0] + text.partition("</style>")[2].partition("<script")[0]
    assert not re.search(r"""(src|href)=|@import|url\(""", head)


@pytest.fixture
def hostile(tmp_path: Path) -> RunFolder:
    """A run of a trainer that writes whatever it likes."""
    nasty = HOSTILE + "</script><script>window.hacked = 9</script>" + SURROGATE
    trials = [
        trial(nasty, step, float(step > 0), error=nasty * 20, source=nasty, group=["g"], agent=7)
        for step in (0, 9)
    ]
    trials += [trial(f"{nasty}{n}", 9, None, status="failed", error=nasty) for n in range(3)]
    trials += [{"step": "x", "kind": [], "task_id": {}, "reward": "1", "turns": None}]
    results = {nasty: evaluation(0, 0.5, 0.1, 0.9), "after": {"success": float("inf"), "step": 1}}
    summary = {"eval": results, "status": nasty, "machine": nasty, "warnings": {nasty: 2}}
    summary |= {"wall_s": nasty, "steps": nasty, "error": nasty}
    config = {"model": {"path": HOSTILE}, "trainer": {HOSTILE: "</script>"}, "api_key": "k-123"}
    metrics = [{"step": 1, nasty: 1.0, "loss": float("nan")}]
    folder = write_run(
        tmp_path / "<b>run", trials=trials, metrics=metrics, summary=summary, config=config
    )
    with folder.trials_log.open("a") as file:
        file.write("not json\n" + json.dumps(trial("long", 9, 1.0, error="y" * 10_000_000)) + "\n")
        file.write('{"step": 9, "kind"')
    folder.logs.mkdir()
    (folder.logs / "proxy.log").write_bytes(b" ERROR \xff" + b"z" * 10_000_000)
    return folder


def test_hostile_content_stays_text_and_the_report_small(hostile: RunFolder) -> None:
    text = write_report(hostile).page.read_text()
    assert len(text) < 500_000
    assert text.count("<script") == text.count("</script>") == 2
    assert not any(char in text for char in ("\x1b", "\u202e", "\x00", SURROGATE))
    assert "k-123" not in text
    assert report_data(hostile)["config"]["api_key"] == "hidden"


def test_size_is_bounded_whatever_the_run(tmp_path: Path) -> None:
    trials = [
        trial(f"{n}" * 100, step, float(step), error="e" * 1000)
        for step in (0, 1)
        for n in range(300)
    ]
    metrics = [{"step": n} | {f"own/{m}": n * m / 7 for m in range(250)} for n in range(400)]
    results = {f"at {n}": evaluation(n, 0.5, 0.1, 0.9) for n in range(3000)}
    own = {f"k{n}": "v" * 900 for n in range(4000)}
    config = {"logging": {"report_trials": 10_000}, "own": own}
    folder = write_run(
        tmp_path / "run", trials=trials, metrics=metrics, summary={"eval": results}, config=config
    )
    data = report_data(folder)
    assert folder.report.stat().st_size < MAX_BYTES
    assert len(data["evaluations"]) == EVALUATIONS
    assert data["evaluations_left_out"] == 3000 - EVALUATIONS
    assert data["curves"]["left_out"] == 50
    assert len(data["config"]) == SETTINGS
    assert data["config_left_out"] == 2001


def test_report_of_a_run_that_goes_on_can_be_written_again(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", metrics=[{"step": 1, "reward/mean": 0.5}])
    assert report_data(folder)["curves"]["last"] == 1
    with folder.metrics.open("a") as file:
        file.write('{"step": 2, "reward/mean": 0.75}\n{"step": 3, "rew')
    assert report_data(folder)["curves"] == {
        "last": 2,
        "metrics": {"reward/mean": [[1, 0.5], [2, 0.75]]},
        "left_out": 0,
    }
