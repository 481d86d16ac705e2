"""The report needs only the run's folder, can be written at any time, and loads nothing else."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from proxy.records import Session, SessionKind, SessionStatus, Turn, TurnStatus
from proxy.store import open_store
from tests.needs import needs
from trainer.report import write_report
from trainer.report.transcript import longest_branch
from trainer.run.folder import RunFolder


def turn(
    index: int, parent: int | None, shared: int, prompt: list[int], sampled: list[int]
) -> Turn:
    return Turn(
        session_id="t-1",
        index=index,
        parent=parent,
        shared_tokens=shared,
        fork_cause=None,
        prompt_ids=np.array(prompt, np.int32),
        request_key=bytes([index]),
        sampling={},
        sampled_ids=np.array(sampled, np.int32),
        logprobs=np.zeros(len(sampled), np.float32),
        status=TurnStatus.DONE,
    )


def test_longest_branch_is_the_path_that_the_engine_saw() -> None:
    turns = [turn(0, None, 0, [1, 2], [3, 4]), turn(1, 0, 4, [5], [6, 7]), turn(2, 0, 3, [9], [8])]
    runs = [(ids.tolist(), sampled) for ids, sampled in longest_branch(turns)]
    assert runs == [([1, 2], False), ([3, 4], True), ([5], False), ([6, 7], True)]


def test_branch_of_a_fork_excludes_tokens_that_it_does_not_share() -> None:
    turns = [turn(0, None, 0, [1, 2], [3, 4]), turn(1, 0, 3, [9, 9], [8])]
    runs = [(ids.tolist(), sampled) for ids, sampled in longest_branch(turns)]
    assert runs == [([1, 2], False), ([3], True), ([9, 9], False), ([8], True)]


def test_session_without_turns_has_no_text() -> None:
    assert longest_branch([]) == []


@pytest.fixture
async def folder(tmp_path: Path, tiny_model: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    settings = {"model": {"path": str(tiny_model)}, "logging": {"report_trials": 3}}
    folder.config.write_text(yaml.safe_dump(settings))
    steps = [{"step": n, "reward/mean": n / 10, "staleness/tokens_at_0": 5} for n in range(1, 9)]
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in steps))
    trial = {"trial_id": "t-1", "task_id": "<task>", "kind": "eval", "step": 0, "reward": 1.0}
    trial |= {"turns": 1, "sampled_tokens": 2, "status": "done"}
    folder.trials_log.write_text(json.dumps(trial) + "\n")
    result = {"success": 0.25, "reward": 0.3, "trials": 64, "failed": 0}
    folder.write_summary({"status": "running", "eval": {"before": result}})
    store = await open_store(f"sqlite:///{folder.sessions}")
    session = Session("t-1", b"k", SessionKind.EVAL, SessionStatus.OPEN, 0.0, 9e9)
    await store.create_session(session)
    for record in [turn(0, None, 0, [40, 41], [42, 43])]:
        await store.begin_turn(record)
        await store.commit_turn(record)
    await store.close()
    return folder


def test_report_has_curves_evaluations_and_trials(folder: RunFolder) -> None:
    text = write_report(folder).page.read_text()
    assert "<svg" in text
    assert "0.250" in text
    assert "&lt;task&gt;" in text
    assert "<span class=s>" in text


def test_report_has_no_secret_of_the_configuration(folder: RunFolder) -> None:
    settings = yaml.safe_load(folder.config.read_text())
    engine = {"urls": ["http://:hunter2@gpu:8001"], "env": {"HF_TOKEN": "hunter2"}}
    folder.config.write_text(yaml.safe_dump(settings | {"engine": engine}))
    text = write_report(folder).page.read_text()
    assert "hunter2" not in text
    assert "http://gpu:8001" in text


def test_transcripts_are_what_the_page_shows_in_full(folder: RunFolder) -> None:
    report = write_report(folder)
    (transcript,) = report.transcripts
    shown = html.unescape(re.sub("<[^>]*>", "", report.page.read_text()))
    assert transcript.facts in shown
    assert len(transcript.text) > 3
    assert transcript.text in shown


def test_report_needs_no_network(folder: RunFolder) -> None:
    text = write_report(folder).page.read_text()
    assert not re.search(r"(src|href)=|<script|@import|url\(", text)


CHROMIUM = shutil.which("chromium")


@needs(None if CHROMIUM else "chromium is not installed: apt-get install chromium")
def test_browser_draws_the_report_without_errors(folder: RunFolder, tmp_path: Path) -> None:
    page, picture = write_report(folder).page, tmp_path / "page.png"
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--incognito"]
    command += [f"--user-data-dir={tmp_path}/browser", "--enable-logging=stderr"]
    command += [f"--screenshot={picture}", "--window-size=1400,1000", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr
    pixels = np.asarray(Image.open(picture).convert("RGB"))
    assert pixels.shape == (1000, 1400, 3)
    assert (pixels == (0x25, 0x63, 0xEB)).all(-1).any()  # a curve
    assert (pixels == (0xDC, 0xFC, 0xE7)).all(-1).any()  # what the policy sampled


def test_report_of_a_run_without_steps_can_be_written(folder: RunFolder) -> None:
    for file in (folder.metrics, folder.trials_log, folder.summary, folder.sessions):
        file.unlink()
    assert "There was no evaluation" in write_report(folder).page.read_text()
