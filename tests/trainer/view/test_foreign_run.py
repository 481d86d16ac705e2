"""A run that another trainer wrote: each request answers as `/openapi.json` describes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from proxy.extras.view.json_answer import answer
from proxy.extras.view.run_folder import RecordedRun
from proxy.extras.view.run_requests import RunRequests
from proxy.extras.view.runs import RecordedRuns
from proxy.store import open_store
from tests.proxy.extras.view.documented import check_answer
from tests.trainer.view.test_run_openapi import handler_of
from trainer.extras.report.page import _ends

DEEP = b"[" * 300 + b"]" * 300
HOSTILE = (
    b'{"step": 1, "trial_id": "\xed\xa0\x80", "status": "done"}',
    rb'{"step": 1, "trial_id": "\ud800", "loss": NaN}',
    b'{"step": 1, "loss": %d}' % 10**30,
    b'{"step": 1, "loss": %s}' % DEEP,
    b'{"step": 1, "trial_id": 7, "kind": [], "reward": "1", "sampled_tokens": "9"}',
    b'{"step": "x", "trial_id": "y", "turns": 2.0, "reward": 1}',
    b'{"step": 1}',
)
SUMMARY = {
    "status": 5,
    "steps": 10**30,
    "warnings": [],
    "error": "\ud800",
    "eval": {
        "x\ud800": {"name": 5, "step": 1, "interval": [None, 1], "success": "much", "more": 2},
        "y": {"interval": [0, 0.5], "step": 2.0, "per_source": {"a": {}, "b": {"rollouts": "x"}}},
    },
}
CONFIG = """
model: {path: "\\ud800"}
loop: &loop [*loop]
lines: [{2020-01-01: x}, 1111111111111111111111111111111]
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "tokens" / "step-x").mkdir(parents=True)
    for name in ("metrics.jsonl", "trials.jsonl"):
        (folder / name).write_bytes(b"".join(line + b"\n" for line in HOSTILE))
    (folder / "summary.json").write_text(json.dumps(SUMMARY))
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "tokens" / "step-x" / "trials.json").write_text('{"trials": 5}')
    return folder


async def ask(folder: Path, name: str, query: str = "") -> Any:
    path = f"/view/run{name}"
    store = await open_store(f"sqlite:///{folder / 'sessions.db'}")
    try:
        requests = RunRequests(lambda: store.browser, RecordedRuns([folder]))
        request = make_mocked_request("GET", f"{path}?run=run{query}")
        answered = await handler_of(requests, path)(request)
    finally:
        await store.close()
    assert isinstance(answered, web.Response)
    assert isinstance(answered.body, bytes)
    check_answer(path, "get", answered.status, answered.body)
    return orjson.loads(answered.body)


async def test_lines_that_cannot_be_sent_as_they_are_leave_the_others(run: Path) -> None:
    metrics = (await ask(run, "/metrics"))["steps"]
    assert [line.get("step") for line in metrics] == [1, 1, 1, 1, 1, "x", 1]
    assert [line["loss"] for line in metrics[1:3]] == [None, 1e30]
    trials = (await ask(run, "/trials"))["trials"][::-1]
    names = ["\ufffd" * 3, "?", None, None, None, "y", None]
    assert [trial["trial_id"] for trial in trials] == names
    assert (trials[4]["reward"], trials[5]["step"], trials[5]["turns"]) == (None, None, 2)
    assert len((await ask(run, "/step", "&step=1"))["trials"]) == 5


@pytest.mark.parametrize("bound", ["min_reward=0", "max_reward=1", "min_tokens=1"])
async def test_values_of_another_type_do_not_match_a_bound(run: Path, bound: str) -> None:
    trials = (await ask(run, "/trials", f"&{bound}"))["trials"]
    assert [trial["trial_id"] for trial in trials] == ["y"][: "reward" in bound]


async def test_summary_and_configuration_are_read_as_far_as_possible(run: Path) -> None:
    found = await ask(run, "")
    assert (found["status"], found["steps"], found["error"]) == (None, None, "?")
    sources = [{"name": name, "reward": None} for name in "ab"]
    assert found["evaluations"] == [
        {"name": "x?", "step": 1, "more": 2},
        {"name": "y", "step": 2, "interval": [0, 0.5], "sources": sources},
    ]
    assert found["config"]["model.path"] == '"?"'
    assert '{"2020-01-01": "x"}' in found["config"]["lines"]
    assert [each["name"] for each in _ends(RecordedRun(run).summary()["evaluations"])] == [
        "x?",
        "y",
    ]


def test_tokens_of_another_form_are_left_out(run: Path) -> None:
    assert RecordedRuns([run]).trained_tokens("y") is None


def test_answer_with_text_that_is_not_utf_8_is_sent() -> None:
    assert answer({"text": "\ud800"}).body == b'{"text":"?"}'


def test_summary_that_is_written_again_with_the_same_length_has_another_stamp(run: Path) -> None:
    recorded = RecordedRun(run)
    before = recorded.stamps()["summary"]
    summary = run / "summary.json"
    summary.write_bytes(summary.read_bytes())
    later = summary.stat().st_mtime_ns + 1_000_000
    os.utime(summary, ns=(later, later))
    after = recorded.stamps()["summary"]
    assert after[:2] == before[:2]
    assert after != before
