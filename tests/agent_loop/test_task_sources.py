"""Task sources that yield their tasks: functions, limits, resuming, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from agent_loop.errors import TaskFileError
from agent_loop.records import Task
from agent_loop.task_sources.registry import AnyTaskSource
from agent_loop.tasks import DataConfig, TaskStream, held_out_tasks, training_tasks
from proxy.errors import ConfigurationError

HERE = "tests.agent_loop.test_task_sources"


def three(seed: int, word: str = "task") -> Iterator[dict[str, Any]]:
    for number in range(3):
        yield {"prompt": f"{word} {number} of {seed}"}


def endless(seed: int) -> Iterator[dict[str, Any]]:
    number = 0
    while True:
        number += 1
        yield {"task_id": number, "prompt": str(number)}


def none(seed: int) -> list[dict[str, Any]]:
    return []


def wrong_rows(seed: int) -> list[str]:
    return ["a"]


def same_names(seed: int) -> list[dict[str, Any]]:
    return [{"task_id": "a"}, {"task_id": "a"}]


def no_iterable(seed: int) -> int:
    return 3


def no_parameter() -> list[dict[str, Any]]:
    return []


def promptless(seed: int) -> list[dict[str, Any]]:
    return [{"x": 1}]


async def asynchronous(seed: int) -> list[dict[str, Any]]:
    return []


def data(**sources: Any) -> DataConfig:
    return DataConfig.model_validate({"train_sources": sources})


def test_function_is_called_with_another_seed_in_each_epoch_and_its_settings() -> None:
    function = {"target": f"{HERE}:three", "settings": {"word": "sum"}}
    stream = training_tasks(data(mine={"function": function}))
    tasks = [stream.draw() for _ in range(6)]
    assert [task.task_id for task in tasks] == [f"mine-{e}-{n}" for e in (0, 1) for n in (1, 2, 3)]
    assert {task.source for task in tasks} == {"mine"}
    assert tasks[0].prompt.startswith("sum 0 of ")
    assert len({task.prompt.rpartition(" ")[2] for task in tasks}) == 2


def stream() -> TaskStream:
    return training_tasks(
        data(mine={"function": f"{HERE}:three"}, other={"function": f"{HERE}:endless"})
    )


@pytest.mark.parametrize("before", [0, 1, 5, 17])
def test_resumed_stream_continues_with_the_same_tasks(before: int) -> None:
    whole, resumed = stream(), stream()
    for _ in range(before):
        whole.draw()
    resumed.draw()
    resumed.restore(dict(whole.cursor.taken))
    assert [whole.draw() for _ in range(9)] == [resumed.draw() for _ in range(9)]


def test_file_and_function_are_mixed_by_their_weights(tmp_path: Path) -> None:
    file = tmp_path / "file.jsonl"
    file.write_text('{"task_id": "f"}\n')
    mixed = training_tasks(
        DataConfig.model_validate(
            {
                "train_files": [str(file)],
                "train_sources": {"mine": {"function": f"{HERE}:endless"}},
                "weights": {"mine": 3},
            }
        )
    )
    assert [mixed.draw().source for _ in range(8)].count("mine") == 6


def test_limit_ends_an_epoch_and_an_endless_held_out_source() -> None:
    section = AnyTaskSource.model_validate({"function": f"{HERE}:endless", "limit": 2})
    source = section.build("mine", seed=0, shuffle=True)
    assert [task.task_id for task in source.epoch(7)] == ["1", "2"]
    held_out = held_out_tasks(DataConfig(val_sources={"mine": section}))
    assert held_out == [
        Task("1", {"task_id": 1, "prompt": "1"}, "mine"),
        Task("2", {"task_id": 2, "prompt": "2"}, "mine"),
    ]


def test_only_the_drawn_tasks_of_a_source_are_read() -> None:
    source = AnyTaskSource.model_validate({"function": f"{HERE}:endless"})
    tasks = source.build("mine", seed=0, shuffle=True).epoch(0)
    assert [task.task_id for task in islice(tasks, 3)] == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({"function": f"{HERE}:no_parameter"}, r"write it as def no_parameter\(seed: int\) -> "),
        (
            {"function": {"target": f"{HERE}:three", "settings": {"words": 1}}},
            r"def three\(seed: int, \*, words\) -> Iterable",
        ),
        ({"function": f"{HERE}:asynchronous"}, "is async; name a function without async"),
        ({"function": f"{HERE}:HERE"}, "is a str; name a function"),
        ({"function": f"{HERE}:absent"}, "has no attribute 'absent'"),
        ({"function": "absent/file.py:tasks"}, "there is no file .*absent/file.py"),
        ({}, "exactly one of the keys function.*this one has none"),
    ],
)
def test_source_that_cannot_be_used_is_refused_with_the_right_form(
    source: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ValidationError, match=expected):
        AnyTaskSource.model_validate(source)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("none", "epoch 0 has no task"),
        ("wrong_rows", "wrong_rows, task 1 of seed .*: a task is a JSON object, but this is a str"),
        ("no_iterable", "no_iterable returned a int; it must yield tasks"),
        ("promptless", "task 'mine-0-1' of source 'mine' has no prompt"),
    ],
)
def test_function_that_yields_no_tasks_is_refused(name: str, expected: str) -> None:
    drawn = training_tasks(data(mine={"function": f"{HERE}:{name}"}), needs_prompt=True)
    with pytest.raises(ConfigurationError, match=expected):
        drawn.draw()


@pytest.mark.parametrize(
    ("name", "expected"),
    [("none", "has no task"), ("same_names", "same task_id"), ("endless", "more than 10 tasks")],
)
def test_held_out_source_that_cannot_be_evaluated_is_refused(
    name: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_loop.tasks.MAX_HELD_OUT", 10)
    section = AnyTaskSource.model_validate({"function": f"{HERE}:{name}"})
    with pytest.raises(TaskFileError, match=rf"data\.val_sources\.mine: .*{expected}"):
        held_out_tasks(DataConfig(val_sources={"mine": section}))


def test_source_that_is_trained_on_is_not_held_out() -> None:
    section = AnyTaskSource.model_validate({"function": f"{HERE}:three"})
    both = DataConfig(train_sources={"a": section}, val_sources={"b": section})
    with pytest.raises(ConfigurationError, match=r"val_sources\.b: .*has the same source"):
        held_out_tasks(both)


def test_source_with_the_name_of_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"task_id": "f"}\n')
    section = AnyTaskSource.model_validate({"function": f"{HERE}:three"})
    with pytest.raises(ConfigurationError, match=r"'mine'.* is also the name of a file"):
        training_tasks(DataConfig(train_files=(file,), train_sources={"mine": section}))


def test_file_of_a_function_is_imported_by_its_path_and_is_private(tmp_path: Path) -> None:
    file = tmp_path / "my_own_tasks.py"
    file.write_text("def tasks(seed):\n    return [{'task_id': 'a'}]\n")
    config = data(mine={"function": f"{file}:tasks"})
    assert training_tasks(config).draw().task_id == "a"
    assert config.private_files == (file,)
