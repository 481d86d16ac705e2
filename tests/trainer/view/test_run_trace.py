"""The trace of a run that the trainer wrote, by the page and by the command."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from proxy.extras.view.trace import ENGINES, FIRST_TRIAL, TRAINER
from tests.proxy.conftest import ADMIN_KEY, StartProxy
from tests.proxy.extras.view.trace_rules import events_of
from tests.trainer.view.recorded_run import begin, training, whole
from trainer.cli import main


async def test_trace_has_every_call_trial_and_phase_of_the_run(
    start_proxy: StartProxy, checkpoint: Path, tmp_path: Path
) -> None:
    proxy, run = await training(start_proxy, begin(tmp_path / "run", checkpoint), "lamps")
    await whole(run)
    url, query = f"{proxy.url}/view/run/trace", {"run": "run"}
    async with proxy.http.get(url, params=query) as response:
        assert response.status == 401
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    async with proxy.http.get(url, params=query, headers=headers) as response:
        assert response.status == 200
        assert "attachment" in response.headers["Content-Disposition"]
        events = events_of(await response.read())
    spans = [event for event in events if event["ph"] == "X"]
    phases = [event["name"] for event in spans if event["pid"] == TRAINER]
    steps = ["sampling", "training", "sending weights"] * 3
    assert phases == ["evaluation before", *steps, "evaluation after"]
    names = Counter(event["name"].split()[0] for event in spans if event["pid"] >= FIRST_TRIAL)
    trials = 3 * 3 + 2  # three steps of three trials, and two evaluations of one
    assert names["sampling"] == names["until"] == 2 * trials
    assert names["verifier"] == trials + 3  # each step has a failed trial without a session
    counts = [event["args"]["calls"] for event in events if event["ph"] == "C"]
    assert counts == [1, 0] * 2 * trials
    sampling = [event for event in spans if event["name"].startswith("sampling ")]
    engines = {event["args"]["engine"] for event in sampling}
    assert len(engines - {""}) == 1
    assert sum(event["pid"] == ENGINES for event in spans) == 3
    # All spans are within the run.
    starts = [event["ts"] for event in spans]
    first = next(event for event in spans if event["name"] == "evaluation before")
    assert min(starts) == first["ts"]


async def test_command_writes_the_trace_of_the_page(
    start_proxy: StartProxy,
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    proxy, run = await training(start_proxy, begin(tmp_path / "run", checkpoint), "lamps")
    await run.step()
    run.log.close()
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    url = f"{proxy.url}/view/run/trace"
    async with proxy.http.get(url, params={"run": "run"}, headers=headers) as response:
        shown = await response.read()
    out = tmp_path / "t.json"
    words = ["trace", str(run.folder.path), "-o", str(out)]
    assert await asyncio.to_thread(main, words) == 0
    assert out.read_bytes() == shown
    assert "ui.perfetto.dev" in capsys.readouterr().out


def test_command_names_what_is_not_a_run_or_cannot_be_written(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", str(tmp_path)]) == 2
    assert "is not a run's folder" in capsys.readouterr().err
    folder = begin(tmp_path / "run", checkpoint)
    assert main(["trace", str(folder.path)]) == 0
    events_of((folder.path / "trace.json").read_bytes())
    assert main(["trace", str(folder.path), "-o", str(tmp_path / "no" / "t.json")]) == 2
    assert "choose another file with -o" in capsys.readouterr().err
