"""Several agents: which agent tries a task, in training and in an evaluation."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent_loop.agents import AgentLoops, Agents, OneOfAgents
from agent_loop.evaluator import EvalConfig, Evaluator
from agent_loop.records import Rollout, Task
from agent_loop.tasks import DataConfig
from proxy.errors import ConfigurationError
from proxy.records import SessionKind
from tests.agent_loop.scripted_loop import ScriptedLoop

COMMAND = {"command": {"argv": ["agent"]}}


def write(folder: Path, name: str, *tasks: dict[str, Any]) -> dict[str, Any]:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return {"train_files": [str(path)]}


def agents(data: dict[str, Any], **sections: dict[str, Any]) -> Agents:
    return Agents(
        {name: OneOfAgents.model_validate({**COMMAND, **own}) for name, own in sections.items()},
        DataConfig.model_validate(data),
    )


def three(folder: Path, seed: int = 0) -> Agents:
    """`own` has tasks of its own; `a` and `b` share tasks, of which one names `b`."""
    shared = write(folder, "shared", {"task_id": "x", "agent": "b"}, {"task_id": "y"})
    own = write(folder, "train", {"task_id": "o1"}, {"task_id": "o2"})
    return agents({**shared, "seed": seed}, a={"weight": 3}, b={}, own={"weight": 4, "data": own})


def test_tasks_follow_the_weights_and_the_field_that_names_an_agent(tmp_path: Path) -> None:
    stream = three(tmp_path).training_tasks()
    drawn = [stream.draw() for _ in range(400)]
    assert Counter(task.source for task in drawn) == {"own/train": 200, "shared": 200}
    assert {task.agent for task in drawn if task.source == "own/train"} == {"own"}
    assert {task.agent for task in drawn if task.task_id == "x"} == {"b"}
    by_weight = Counter(task.agent for task in drawn if task.task_id == "y")
    assert set(by_weight) == {"a", "b"}
    assert 60 <= by_weight["a"] <= 90  # 75 of 100 by the weights
    assert sorted(task.task_id for task in stream.listed()) == ["o1", "o2", "x", "y"]


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.integers(0, 60), st.integers(0, 3))
def test_resumed_stream_continues_with_the_same_tasks_and_agents(
    tmp_path: Path, before: int, seed: int
) -> None:
    run = three(tmp_path, seed)
    whole, resumed = run.training_tasks(), run.training_tasks()
    for _ in range(before):
        whole.draw()
    resumed.restore(whole.cursor.taken)
    assert [whole.draw() for _ in range(20)] == [resumed.draw() for _ in range(20)]


def test_held_out_task_is_tried_by_every_agent_that_shares_it(tmp_path: Path) -> None:
    def held_out(*names: str, **task: Any) -> dict[str, Any]:
        files = [
            write(tmp_path, name, {"task_id": name, **task})["train_files"][0] for name in names
        ]
        return {"val_files": files}

    data = {"val_files": [*held_out("p", "q")["val_files"], *held_out("r", agent="b")["val_files"]]}
    run = agents(data, a={}, b={}, own={"data": held_out("s")})
    found = [(task.agent, task.task_id, task.source) for task in run.held_out_tasks()]
    assert found == [
        *(("a", "p", "p"), ("a", "q", "q")),
        *(("b", "p", "p"), ("b", "q", "q"), ("b", "r", "r")),
        ("own", "s", "own/s"),
    ]
    assert [task.agent for task in run.held_out_tasks(limit=1)] == ["a", "b", "own"]


def test_training_tasks_can_be_collected_by_each_agent(tmp_path: Path) -> None:
    found = three(tmp_path).training_as_held_out().held_out_tasks()
    assert [(task.agent, task.task_id) for task in found] == [
        *(("a", "y"), ("b", "x"), ("b", "y")),
        *(("own", "o1"), ("own", "o2")),
    ]


async def test_evaluation_has_scores_per_agent(tmp_path: Path) -> None:
    tasks = [Task("t", {}, "s", agent) for agent in ("a", "b")]
    loop = ScriptedLoop(reward=lambda task, seed: float(task.agent == "a"))
    report = await Evaluator(loop, tasks, EvalConfig()).evaluate(version=0)
    assert {name: score.success for name, score in report.per_agent.items()} == {"a": 1, "b": 0}
    assert set(report.as_dict()["per_agent"]) == {"a", "b"}
    alone = await Evaluator(loop, [Task("t", {}, "s")], EvalConfig()).evaluate(version=0)
    assert "per_agent" not in alone.as_dict()


async def test_trial_runs_in_the_loop_of_its_agent() -> None:
    class Recorded:
        def __init__(self, name: str) -> None:
            self.name = name
            self.tried: list[str] = []
            self.closed = False

        async def run(self, task: Task, **_: Any) -> Rollout:
            self.tried.append(task.task_id)
            return await ScriptedLoop().run(task, kind=SessionKind.TRAIN)

        async def close(self) -> None:
            self.closed = True

    recorded: Sequence[Recorded] = [Recorded("a"), Recorded("b")]
    loops = AgentLoops({loop.name: loop for loop in recorded})  # type: ignore[misc]
    for name, agent in (("1", "a"), ("2", "b"), ("3", "a")):
        await loops.run(Task(name, {}, "s", agent), kind=SessionKind.TRAIN)
    assert [loop.tried for loop in recorded] == [["1", "3"], ["2"]]
    with pytest.raises(ConfigurationError, match=r"for the agent 'c', but .* \['a', 'b'\]"):
        await loops.run(Task("4", {}, "s", "c"), kind=SessionKind.TRAIN)
    await loops.close()
    assert all(loop.closed for loop in recorded)


def test_task_that_names_no_agent_is_refused_before_the_run_starts(tmp_path: Path) -> None:
    data = write(tmp_path, "tasks", {"task_id": "x", "agent": "c"})
    with pytest.raises(ConfigurationError, match=r"task 'x' .*'agent' is 'c'; the agents are"):
        agents(data, a={}, b={}).training_tasks()
    held_out = {"val_files": data["train_files"], "agent_field": "tool"}
    assert agents(held_out, a={}, b={}).held_out_tasks()  # another field has no meaning


def test_shared_tasks_that_nobody_tries_are_refused(tmp_path: Path) -> None:
    data = write(tmp_path, "tasks", {"task_id": "x"})
    with pytest.raises(ConfigurationError, match="each of the agents has data of its own"):
        agents(data, a={"data": data}).training_tasks()


def test_prompt_is_needed_for_the_agent_that_uses_it_alone(tmp_path: Path) -> None:
    data = write(tmp_path, "tasks", {"task_id": "x"})
    prompted = {"command": {"argv": ["agent", "{prompt}"]}}
    assert agents({}, a={"data": data}, b={"data": data}).training_tasks().draw().task_id == "x"
    with pytest.raises(ConfigurationError, match=r"task 'x' .*no prompt"):
        agents({}, a={"data": data}, b={**prompted, "data": data}).training_tasks()
