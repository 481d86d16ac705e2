"""A list of trials runs each trial once, over several starts."""

from __future__ import annotations

from pathlib import Path

from agent_loop.producers.trial_list import TrialList, read_lines
from agent_loop.records import Task
from proxy.records import SessionKind
from tests.agent_loop.scripted_loop import ScriptedLoop

TASKS = [Task("a", {}, "s"), Task("b", {}, "s")]


async def test_second_start_runs_only_trials_that_are_missing_or_failed(tmp_path: Path) -> None:
    file = tmp_path / "trials.jsonl"
    loop = ScriptedLoop(reward=lambda *_: 1.0, fails=lambda task, _: task.task_id == "b")
    lines = await TrialList(loop, TASKS, 2, SessionKind.EVAL, file).run()
    assert sorted((line.task_id, line.repeat, line.judged) for line in lines) == [
        ("a", 0, True),
        ("a", 1, True),
        ("b", 0, False),
        ("b", 1, False),
    ]
    with file.open("a") as broken:
        broken.write('{"task_id": "a", "sour')  # cut off by a crash
    again = ScriptedLoop(reward=lambda *_: 0.5)
    lines = await TrialList(again, TASKS, 2, SessionKind.EVAL, file).run()
    assert len(again.kinds) == 2  # the two that failed
    assert all(line.judged for line in lines)
    assert {line.task_id: line.reward for line in read_lines(file)} == {"a": 1.0, "b": 0.5}
