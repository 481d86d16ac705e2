"""A training run of the quickstart, as Phoenix gets it while it trains and as Perfetto shows it.

The run is real: `agentic-train`, its vLLM, its proxy, and agents on the OpenAI SDK.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from proxy.extras.telemetry.spans import trial_context
from proxy.extras.view.run_folder import reading
from proxy.run_files.files import read_jsonl
from proxy.store.browser import TurnHead
from tests.e2e import perfetto, phoenix
from tests.e2e.phoenix import Spans
from tests.needs import needs
from tests.pages import ROOT
from tests.proxy.extras.view import chromium
from trainer.run.folder import RunFolder

pytestmark = [pytest.mark.engine, pytest.mark.long]

STEPS = 2
GROUPS, GROUP_SIZE = 2, 4
HELD_OUT = 4
TRIALS = STEPS * GROUPS * GROUP_SIZE + 2 * HELD_OUT
PHASES = {"sampling": "rl.sample", "training": "rl.train", "sending weights": "rl.sync"}


def train(folder: Path, collector: str) -> RunFolder:
    """Trains for some steps, with spans sent to a collector."""
    settings = {
        "trainer.steps": STEPS,
        "trainer.run_dir": folder / "run",
        "trainer.preflight_s": 0,  # its spans are those of one more trial
        "rollout.groups_per_step": GROUPS,
        "rollout.group_size": GROUP_SIZE,
        "algorithm.mini_batches": 1,
        "eval.limit": HELD_OUT,
        "telemetry.endpoint": collector,
    }
    words = ["--config", "agentic_trainer.yaml", *(f"{k}={v}" for k, v in settings.items())]
    done = subprocess.run(
        [Path(sys.executable).with_name("agentic-train"), *words],
        cwd=ROOT,
        env=os.environ | {"OTEL_METRICS_EXPORTER": "none"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return RunFolder.open(folder / "run")


@dataclass(frozen=True)
class ObservedRun:
    folder: RunFolder
    spans: Spans
    """Those that Phoenix has."""

    async def calls(self) -> dict[str, TurnHead]:
        """The recorded calls, by the id of their response."""
        async with reading(self.folder.sessions) as browser:
            heads = [head for _, head in await browser.begun(0, 10_000)]
        return {f"{head.session_id}#{head.index}": head for head in heads}

    def named(self, name: str) -> Spans:
        return [span for span in self.spans if span["name"].startswith(name)]


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObservedRun]:
    folder = tmp_path_factory.mktemp("observed")
    with phoenix.running(folder) as collector:
        run = train(folder, collector.url)
        # The trainer and its proxy send what they have before they end.
        ended = {"saving", "evaluation after"}
        spans = collector.spans(
            lambda found: (
                ended <= {span["name"] for span in found}
                and sum(span["name"] == "rl.reward" for span in found) == TRIALS
            )
        )
        yield ObservedRun(run, spans)


@needs(phoenix.MISSING)
async def test_phoenix_has_every_call_trial_verifier_and_step_as_parts_of_each_other(
    observed: ObservedRun,
) -> None:
    trials = {line["trial_id"]: line for line in read_jsonl(observed.folder.trials_log)}
    assert len(trials) == TRIALS
    shown = {span["attributes"]["session.id"]: span for span in observed.named("invoke_agent")}
    assert shown.keys() == trials.keys()
    for name, span in shown.items():
        context = trial_context(name)
        assert span["context"]["trace_id"] == f"{context.trace_id:032x}"
        assert span["context"]["span_id"] == f"{context.span_id:016x}"
        assert span["attributes"]["agentic.trial.reward"] == trials[name]["reward"]
        assert span["attributes"]["agentic.trial.turns"] == trials[name]["turns"]
        assert span["attributes"]["rl.environment.name"] == trials[name]["source"]
    calls = await observed.calls()
    sent = {span["attributes"]["gen_ai.response.id"]: span for span in observed.named("chat ")}
    assert sent.keys() == calls.keys()
    for name, span in sent.items():
        call, attributes = calls[name], span["attributes"]
        assert span["parent_id"] == shown[call.session_id]["context"]["span_id"]
        assert span["context"]["trace_id"] == shown[call.session_id]["context"]["trace_id"]
        assert attributes["gen_ai.usage.input_tokens"] == call.shared_tokens + call.new_tokens
        assert attributes["gen_ai.usage.output_tokens"] == call.sampled_tokens
        assert attributes["agentic.policy.versions"] == [each.version for each in call.versions]
    of_trials = {span["context"]["span_id"] for span in shown.values()}
    tools, rewards = observed.named("execute_tool "), observed.named("rl.reward")
    assert {span["span_kind"] for span in tools} == {"TOOL"}
    assert {span["parent_id"] for span in rewards} == of_trials
    assert {span["parent_id"] for span in tools} <= of_trials
    loops = {
        span["attributes"]["rl.loop.iteration"]: span["context"]["span_id"]
        for span in observed.named("rl.loop")
    }
    assert sorted(loops) == list(range(1, STEPS + 1))
    for phase, name in PHASES.items():
        steps = Counter(
            line["step"] for line in read_jsonl(observed.folder.phases) if line["phase"] == phase
        )
        parts = observed.named(name)
        assert Counter(span["attributes"]["rl.loop.iteration"] for span in parts) == steps
        for span in parts:  # the engines' first weights, in step 0, are sent before the first step
            assert span["parent_id"] == loops.get(span["attributes"]["rl.loop.iteration"])


@needs(phoenix.MISSING)
@needs(perfetto.MISSING)
@needs(chromium.MISSING)
async def test_perfetto_shows_every_call_trial_and_phase_with_its_times(
    observed: ObservedRun, tmp_path: Path
) -> None:
    file = tmp_path / "trace.json"
    command = Path(sys.executable).with_name("agentic-train")
    process = await asyncio.create_subprocess_exec(
        command, "trace", observed.folder.path, "-o", file
    )
    assert await process.wait() == 0
    calls = await observed.calls()
    trials = {line["trial_id"]: line for line in read_jsonl(observed.folder.trials_log)}
    phases = list(read_jsonl(observed.folder.phases))
    async with (
        chromium.chromium(tmp_path / "profile") as browser,
        perfetto.opened(browser, file.read_bytes()) as trace,
    ):
        wrong = "select name, value from stats where severity != 'info' and value > 0"
        assert await trace.query(wrong) == []
        spans = await trace.query(
            "select slice.name, slice.ts, slice.dur, process.name as process from slice"
            " join thread_track on slice.track_id = thread_track.id"
            " join thread using (utid) join process using (upid) order by slice.ts"
        )
        assert [span["name"] for span in spans if span["process"] == "trainer"] == [
            phase["phase"] for phase in phases
        ]
        sampled = {
            f"{span['process'].split()[1]}#{span['name'].split()[1]}": span
            for span in spans
            if span["name"].startswith("sampling ")
        }
        assert sampled.keys() == calls.keys()
        for name, span in sampled.items():
            seconds = calls[name].duration_s
            assert seconds is not None
            assert span["dur"] / 1e9 == pytest.approx(seconds, abs=2e-6)
        shown = await trace.query(
            "select process.name, coalesce(int_value, real_value) as reward from slice"
            " join thread_track on slice.track_id = thread_track.id"
            " join thread using (utid) join process using (upid)"
            " join args on slice.arg_set_id = args.arg_set_id and args.key = 'args.reward'"
            " where slice.name != 'verifier'"
        )
        rewards = {each["name"].split()[1]: each["reward"] for each in shown}
        assert rewards == {name: trial["reward"] for name, trial in trials.items()}
        (flights,) = await trace.query(
            "select count(*) as n, min(value) as low, max(value) as high from counter"
        )
        assert flights["n"] == 2 * len(calls)
        assert flights["low"] == 0
        assert 1 <= flights["high"] <= len(trials)


def test_run_ends_as_usual_while_its_collector_never_answers(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        run = train(tmp_path, f"http://127.0.0.1:{silent.getsockname()[1]}")
    summary = run.read_summary()
    assert summary["status"] == "done"
    assert summary["steps"] == STEPS
