"""A recorded run is audited, computed again from its record, and computed without a session."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from agent_loop.producers.rollout_format import decode_group, encode_group
from agent_loop.records import Group, Segment
from tests.trainer.extras.ledger.recorded_run import (
    GROUPS,
    SAVED,
    SIZE,
    STEPS,
    Recorded,
    hashes,
)
from trainer.cli import main
from trainer.extras.ledger.ledger import Ledger
from trainer.extras.ledger.prompts import differences, form
from trainer.run.folder import RunFolder

Change = Callable[[list[Group]], None]


def change_batch(folder: Path, step: int, change: Callable[[Segment], None]) -> None:
    """Changes the first segment of the second trial of a step."""
    file = folder / "batches" / f"step-{step:06d}"
    groups = [decode_group(part) for part in msgspec.msgpack.decode(file.read_bytes())]
    segment = groups[0].rollouts[1].segments[0]
    for name in ("ids", "logprobs"):
        object.__setattr__(segment, name, getattr(segment, name).copy())
    change(segment)
    file.write_bytes(msgspec.msgpack.encode([encode_group(group) for group in groups]))


def change_line(folder: Path, number: int, change: Callable[[dict[str, object]], None]) -> None:
    file = folder / "ledger.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines()
    line = json.loads(lines[number])
    change(line)
    lines[number] = json.dumps(line)
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_replay_has_the_recorded_weights_after_every_step(
    run: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(run.folder.path)]) == 0
    said = capsys.readouterr().out
    for step, weights in enumerate(hashes(run.folder.path), 1):
        assert f"step {step}: equal, weights {weights[:16]}" in said
    assert len(set(hashes(run.folder.path))) == STEPS


def test_replay_takes_nothing_from_the_environment(
    run: Recorded, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run's configuration has what was set when it was made."""
    monkeypatch.setenv("AGENTIC_TRAIN__OPTIMIZER__LR", "0.02")
    assert main(["replay", str(run.folder.path)]) == 0, capsys.readouterr().err


def test_replay_from_a_checkpoint(run: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(run.folder.path), "--from", str(SAVED)]) == 0
    said = capsys.readouterr().out
    assert "step 2:" not in said
    assert "step 3: equal" in said
    assert main(["replay", str(run.folder.path), "--from", "1"]) == 2
    assert "there are 2" in capsys.readouterr().err


def test_replay_names_step_trial_turn_and_token_of_another_id(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def another_id(segment: Segment) -> None:
        (at, *_) = np.flatnonzero(segment.mask & (segment.turns == 1))
        segment.ids[at + 2] ^= 1

    change_batch(copy, 2, another_id)
    assert main(["replay", str(copy)]) == 1
    output = capsys.readouterr()
    assert "step 1: equal" in output.out
    groups = [
        decode_group(p) for p in msgspec.msgpack.decode((copy / "batches/step-000002").read_bytes())
    ]
    (segment,) = groups[0].rollouts[1].segments
    position = int(np.flatnonzero(segment.mask & (segment.turns == 1))[2])
    assert (
        f"step 2: trial task-2-0-1, turn 1, token at position {position} (logprobs)" in output.err
    )


def test_replay_names_the_gradient_of_another_rate(
    run: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(run.folder.path), "optimizer.lr=0.02"]) == 1
    assert "step 1: the gradient of optimizer step 2 differs" in capsys.readouterr().err


def test_audit_counts_every_token_with_its_reason(
    run: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", str(run.folder.path)]) == 0
    said = {
        line.split()[2]: int(line.split()[0]) for line in capsys.readouterr().out.splitlines()[:-1]
    }
    assert said["delivered"] == said["trained"] + said["no"] + said["cut"]
    trained = sum(r.sampled_tokens for step in run.groups for g in step for r in g.rollouts)
    assert said["trained"] == trained
    assert said["cut"] > 0 < said["no"]


@pytest.mark.parametrize(
    ("step", "change", "problem"),
    [
        (1, lambda s: s.logprobs.__setitem__(np.flatnonzero(s.mask)[0], -9.0), "log-probability"),
        (3, lambda s: s.ids.__setitem__(np.flatnonzero(s.mask)[0], 3), "id 3 was trained"),
    ],
)
def test_audit_finds_a_changed_batch(
    copy: Path,
    step: int,
    change: Callable[[Segment], None],
    problem: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    change_batch(copy, step, change)
    assert main(["audit", str(copy)]) == 1
    said = capsys.readouterr().err
    assert f"step-{step:06d} is missing or was changed" in said
    assert f"step {step}, trial task-{step}-0-1, turn 0, token 0: {problem}" in said


def test_chain_shows_a_changed_and_a_removed_line(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_line(copy, 2, lambda line: line.update(batch="0"))
    assert main(["audit", str(copy)]) == 1
    assert "line 3 (step 2) was changed" in capsys.readouterr().err
    file = copy / "ledger.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    file.write_text("".join([*lines[:2], *lines[3:]]), encoding="utf-8")
    assert main(["replay", str(copy)]) == 1
    assert "line 3 does not follow" in capsys.readouterr().err


@pytest.mark.parametrize("step", [1, 3])
def test_forget_has_the_weights_of_a_run_without_the_session(
    run: Recorded, tmp_path: Path, step: int, capsys: pytest.CaptureFixture[str]
) -> None:
    session = f"task-{step}-1-2"
    out = tmp_path / "without"
    assert main(["forget", str(run.folder.path), session, "--out", str(out)]) == 0
    before, after = hashes(run.folder.path), hashes(out)
    assert after[: step - 1] == before[: step - 1]
    assert not set(after[step - 1 :]) & set(before)
    first = json.loads((out / "ledger.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert first["forgets"] == session
    capsys.readouterr()
    assert (
        main(["replay", str(out)]) == 0
    )  # from the beginning, also where it began at a checkpoint
    trials = [
        t["trial"]
        for line in (out / "ledger.jsonl").read_text().splitlines()
        for g in json.loads(line).get("groups", ())
        for t in g["trials"]
    ]
    assert session not in trials
    assert len(trials) == STEPS * 2 * SIZE - 1


def test_audit_and_replay_of_a_run_that_went_on_with_another_configuration(
    run: Recorded, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder.open(copy)
    written = folder.config.read_text(encoding="utf-8")
    folder.config.write_text(written.replace(f"steps: {STEPS}", "steps: 9"), encoding="utf-8")
    Ledger(folder, run.config.model.path).close()
    (copy / "checkpoints" / f"step-{SAVED:06d}-mine").mkdir()
    assert main(["audit", str(copy)]) == 0
    capsys.readouterr()
    assert main(["replay", str(copy)]) == 2
    said = capsys.readouterr().err
    assert f"another configuration after step {STEPS}" in said
    assert f"--to {STEPS}" in said
    session, out = f"task-{SAVED}-0-1", str(copy.with_name("without"))
    assert main(["forget", str(copy), session, "--out", out]) == 2
    assert not Path(out).exists()
    assert main(["replay", str(copy), f"trainer.steps={STEPS}"]) == 0


def test_step_of_which_nothing_is_left_is_passed_over(
    run: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Forgotten one after the other, until the second step has no trial."""
    before, numbers = run.folder.path, range(GROUPS * SIZE)
    names = [f"task-{SAVED}-{number // SIZE}-{number % SIZE}" for number in numbers]
    for session in names:
        out = tmp_path / session
        assert main(["forget", str(before), session, "--out", str(out)]) == 0
        before = out
    capsys.readouterr()
    assert main(["replay", str(out)]) == 0
    said = capsys.readouterr().out
    assert "step 1: equal" in said
    assert "step 2" not in said
    assert "step 3: equal" in said
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-000003"]


def test_gradients_do_not_depend_on_threads(tiny_model: Path, tmp_path: Path) -> None:
    """In processes of their own, because MKL's mode is read at its first call."""
    run = str(tmp_path / "run")
    make = ("tests.trainer.extras.ledger.recorded_run", str(tiny_model), run)
    for threads, words in (("1", make), ("2", ("trainer.cli", "replay", run))):
        environment = {**os.environ, "OMP_NUM_THREADS": threads}
        command = [sys.executable, "-m", *words]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr
    lines = (Path(run) / "ledger.jsonl").read_text(encoding="utf-8").splitlines()
    assert {json.loads(line)["sums"] for line in lines[1:]} == {"in one order"}


def test_forms_of_what_differs_between_prompts() -> None:
    one = "Today is 2026-11-26. Your folder is /tmp/a81x/work, process 812. Go."
    other = "Today is 2026-11-27. Your folder is /tmp/b12/work, process 99. Go."
    names = [name for name, _ in differences(one, other)]
    assert names == ["date", "folder", "process id or number"]
    assert form("call_a8f", "call_b71") == "random id"
    assert form("yes", "no") == "other text"
