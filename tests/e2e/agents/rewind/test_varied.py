"""The varied trials can be run twice: what their commands print and write is the same, except for
what the shipped profile tolerates."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from random import Random

import pytest

from proxy.branching.tolerance import Tolerance
from proxy.settings.profiles import Profiles
from proxy.testing.scripted_engine import Fault
from tests.e2e.agents.model import DONE
from tests.e2e.agents.rewind.player import Player, steps_done
from tests.e2e.agents.rewind.proof import GOOD, MEASURED, NAMES, good_run, line, read, table
from tests.e2e.agents.rewind.rewound import difference, state_of
from tests.e2e.agents.rewind.varied import (
    COMMANDS,
    MAX_STEPS,
    MIN_STEPS,
    Shell,
    Step,
    VariedTrial,
    varied_trial,
)

PAGE = Path(__file__).parents[4] / "docs" / "notes" / "rewind.md"
TOOLS = '<tools>\n{"name": "bash", "parameters": {"properties": {"command": {}}}}\n</tools>\n'


@pytest.mark.parametrize("kind", COMMANDS)
def test_command_run_twice_differs_only_in_what_is_tolerated(kind: str, tmp_path: Path) -> None:
    tolerance = Tolerance(Profiles({}).get("default"), {"session": ["first", "second"]})
    command, seen, states = COMMANDS[kind](Random(1), "amber1"), [], []
    for name in ("first", "second"):
        folder = tmp_path / name / "work"
        folder.mkdir(parents=True)
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        seen.append((done.returncode, tolerance.masked(done.stdout)))
        states.append(state_of(folder))
    assert seen[0] == seen[1]
    assert difference(tolerance, *states) is None


def test_file_that_differs_is_found() -> None:
    tolerance = Tolerance(Profiles({}).get("default"), {})
    one = {"a.txt": b"took 0.1 s", "b.txt": b"2 files"}
    assert difference(tolerance, one, one | {"a.txt": b"took 0.2 s"}) is None
    assert difference(tolerance, one, one | {"b.txt": b"3 files"}) == "b.txt: '2 files'"
    assert difference(tolerance, one, {"a.txt": b"took 0.1 s"}) == "b.txt: '2 files'"


def test_trials_are_varied_and_the_same_for_a_seed() -> None:
    trials = [varied_trial(17, number) for number in range(40)]
    assert trials == [varied_trial(17, number) for number in range(40)]
    assert len(set(trials)) == len(trials)
    assert {len(trial.steps) for trial in trials} == set(range(MIN_STEPS, MAX_STEPS + 1))
    steps = [step for trial in trials for step in trial.steps]
    assert {len(step.actions) for step in steps} == {1, 2, 3}
    assert {step.fault.kind for step in steps if step.fault} == {"die", "error"}
    assert {type(action).__name__ for step in steps for action in step.actions} == {
        "Shell",
        "WriteFile",
        "ReadFile",
        "EditFile",
    }


def test_player_takes_the_step_after_the_last_results() -> None:
    failed: list[Fault] = []
    fault = Fault("die", 3)
    trial = VariedTrial(0, (Step((Shell("one"), Shell("two"))), Step((Shell("three"),), fault)))
    play = Player(trial, "", failed.append)
    first = play(TOOLS)
    assert first.count("<tool_call>") == 2
    assert failed == [fault]
    asked = f"{TOOLS}<|im_start|>assistant\n{first}"
    assert steps_done(asked) == 0
    second = play(f"{asked}<tool_response>\nhi")
    assert '"three"' in second
    assert failed == [fault]
    assert play(f"{asked}<tool_response>\nhi{second}<tool_response>\n") == DONE


def test_table_counts_what_was_measured() -> None:
    good = {
        "seed": 17, "trial": 0, "turn": 1, "reached": True, "workspace": None, "early_calls": 0,
        "first_prompt": True, "tolerated": {"time": 2},
    }  # fmt: skip
    bad = {**good, "turn": 2, "reached": False, "early_calls": 1, "tolerated": {"port": 1}}
    changed = {**good, "trial": 1, "workspace": "a.txt", "first_prompt": False}
    line = table({"codex": [good, bad, changed]}).splitlines()[-1]
    assert line == "| codex | 2 | 3 | 2 (66.7%) | 1 of 2 | 1 | 1 of 2 | time 4, port 1 |"


def test_line_has_what_differs_from_a_good_run_and_is_read_back(tmp_path: Path) -> None:
    run = {"seed": 17, "trial": 0, "of": 9, "turn": 1}
    good = {**GOOD, **run, "tolerated": {"time": 2}}
    bad = {**GOOD, **run, "reached": False, "diverged": "first line\n- a\n+ b"}
    assert json.loads(line({**GOOD, **run})) == run
    assert json.loads(line(good)) == {**run, "tolerated": {"time": 2}}
    (tmp_path / "codex.jsonl").write_text(f"{line(good)}\n{line(bad)}\n")
    assert read(tmp_path) == {"codex": [good, bad]}
    assert (good_run(good), good_run(bad)) == (True, False)
    assert not good_run({**good, "early_calls": 1})


def test_committed_lines_are_those_of_the_table_in_the_docs() -> None:
    measured = read(MEASURED)
    assert measured.keys() <= set(NAMES)
    for agent, rows in measured.items():
        runs = [(each["seed"], each["trial"], each["turn"]) for each in rows]
        assert len(set(runs)) == len(runs), agent
        assert all(1 <= each["turn"] <= each["of"] for each in rows), agent
    assert table(measured) in PAGE.read_text()
