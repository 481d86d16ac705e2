"""Reading task files, and resuming the draws of a task stream from a cursor."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_loop.errors import TaskFileError
from agent_loop.launchers.command import CommandConfig
from agent_loop.launchers.registry import AgentConfig
from agent_loop.records import Task
from agent_loop.task_sources.files import read_jsonl, read_parquet, read_tasks
from agent_loop.tasks import (
    DataConfig,
    Source,
    TaskStream,
    held_out_tasks,
    trained_too,
    training_tasks,
)
from proxy.errors import ConfigurationError


def test_tasks_are_read_with_their_ids_and_the_source(tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    path.write_text('{"task_id": "a", "x": 1}\n\n{"x": 2}\n{"id": 7}\n')
    assert read_jsonl(path) == [
        Task("a", {"task_id": "a", "x": 1}, "sums"),
        Task("sums-3", {"x": 2}, "sums"),
        Task("7", {"id": 7}, "sums"),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1}\n{"a": oops}\n', r"t\.jsonl:2: not JSON .*oops.*fix or remove"),
        ("[1, 2]\n", r"t\.jsonl:1: a task is a JSON object, but this is a list"),
        ('{"task_id": "x"}\n{"task_id": "x"}\n', r"t\.jsonl:2: task_id 'x' is used twice"),
        ('{"task_id": [1]}\n', r"t\.jsonl:1: task_id \[1\] is not a name"),
        ("\n", r"t\.jsonl: no task in it"),
    ],
)
def test_broken_file_is_refused_in_one_line_with_place_value_and_remedy(
    tmp_path: Path, text: str, expected: str
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(TaskFileError, match=expected) as error:
        read_jsonl(path)
    assert "\n" not in str(error.value)


def test_missing_task_file_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(TaskFileError, match=r"none\.jsonl: cannot read"):
        read_jsonl(tmp_path / "none.jsonl")


def source(name: str, size: int, weight: float = 1.0) -> Source:
    return Source(name, [Task(f"{name}{i}", {}, name) for i in range(size)], weight)


def test_epoch_holds_every_task_once_and_the_next_epoch_has_another_order() -> None:
    stream = TaskStream([source("a", 20)], seed=1)
    first = [stream.draw().task_id for _ in range(20)]
    second = [stream.draw().task_id for _ in range(20)]
    assert sorted(first) == sorted(second) == sorted(f"a{i}" for i in range(20))
    assert first != second


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.floats(0.1, 10)), min_size=1, max_size=4),
    st.integers(0, 60),
    st.integers(0, 3),
)
def test_restored_stream_continues_with_the_same_tasks(
    shapes: list[tuple[int, float]], before: int, seed: int
) -> None:
    sources = [source(f"s{i}", size, weight) for i, (size, weight) in enumerate(shapes)]
    whole, part = TaskStream(sources, seed=seed), TaskStream(sources, seed=seed)
    for _ in range(before):
        whole.draw()
        part.draw()
    resumed = TaskStream(sources, seed=seed)
    resumed.restore(part.cursor.taken)
    assert [whole.draw() for _ in range(20)] == [resumed.draw() for _ in range(20)]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0.5, 4), min_size=1, max_size=4), st.integers(1, 200))
def test_every_prefix_of_the_stream_follows_the_weights(weights: list[float], draws: int) -> None:
    stream = TaskStream([source(f"s{i}", 3, w) for i, w in enumerate(weights)], seed=0)
    drawn = Counter(stream.draw().source for _ in range(draws))
    for i, weight in enumerate(weights):
        assert abs(drawn[f"s{i}"] - draws * weight / sum(weights)) <= len(weights)


def test_source_that_is_added_later_starts_at_its_share() -> None:
    old = TaskStream([source("a", 3)], seed=0)
    for _ in range(100):
        old.draw()
    stream = TaskStream([source("a", 3), source("b", 3)], seed=0)
    stream.restore(old.cursor.taken)
    drawn = Counter(stream.draw().source for _ in range(10))
    assert drawn == {"a": 5, "b": 5}


def test_rows_of_a_parquet_file_are_tasks(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"task_id": "a", "x": [1, 2]}, {"task_id": "b", "x": []}]
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert read_tasks(path) == [Task("a", rows[0], "rows"), Task("b", rows[1], "rows")]


def test_values_of_a_parquet_file_are_those_of_json_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    at = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
    rows: list[dict[str, Any]] = [{"prompt": "x", "at": at}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    (task,) = read_parquet(path)
    assert json.loads(json.dumps(dict(task.data)))["at"] == "2026-11-30T12:00:00+00:00"
    rows = [{"prompt": "x", "picture": b"\x89PNG"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    with pytest.raises(TaskFileError, match=r"rows\.parquet: a row cannot be written as JSON"):
        read_parquet(path)


def test_file_that_is_not_parquet_is_refused_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_text("{}")
    with pytest.raises(TaskFileError, match=r"rows\.parquet: cannot read it as Parquet"):
        read_tasks(path)


@pytest.mark.parametrize(
    ("argv", "needed"),
    [
        (("agent", "{prompt}"), True),
        (("bash", "-c", 'agent "$TASK_PROMPT"'), True),
        (("agent", "{task_file}"), False),
    ],
)
def test_tasks_without_a_prompt_are_refused_where_the_command_uses_it(
    tmp_path: Path, argv: tuple[str, ...], needed: bool
) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"task_id": "a", "question": "why"}\n{"task_id": "b", "answer": 3}\n')
    agent = AgentConfig(command=CommandConfig(argv=argv))
    assert agent.needs_prompt is needed
    train, held_out = DataConfig(train_files=(file,)), DataConfig(val_files=(file,))
    if not needed:
        stream = training_tasks(train, needs_prompt=agent.needs_prompt)
        assert {stream.draw().task_id for _ in range(2)} == {"a", "b"}
        return
    with pytest.raises(ConfigurationError, match=r"task 'b' .* has no prompt"):
        training_tasks(train, needs_prompt=True)
    with pytest.raises(ConfigurationError, match=r"task 'b' .* has no prompt"):
        held_out_tasks(held_out, needs_prompt=True)


def test_two_files_of_one_name_are_refused_because_one_would_never_be_trained(
    tmp_path: Path,
) -> None:
    files = (tmp_path / "easy" / "train.jsonl", tmp_path / "hard" / "train.parquet")
    for file in files:
        file.parent.mkdir()
        file.write_text('{"prompt": "1 + 1"}\n')
    with pytest.raises(ConfigurationError, match=r"easy/train.jsonl and .*hard/train.parquet have"):
        training_tasks(DataConfig(train_files=files))


def test_held_out_tasks_that_would_count_as_one_are_refused(tmp_path: Path) -> None:
    files = (tmp_path / "easy" / "test.jsonl", tmp_path / "hard" / "test.jsonl")
    for file in files:
        file.parent.mkdir()
        file.write_text('{"prompt": "1 + 1"}\n')
    data = DataConfig(val_files=files)
    with pytest.raises(ConfigurationError, match="two of the source 'test' have the task_id 'test"):
        held_out_tasks(data)
    files[1].write_text('{"task_id": "hard-1", "prompt": "1 + 1"}\n')
    assert [task.task_id for task in held_out_tasks(data)] == ["test-1", "hard-1"]


def test_same_task_under_another_name_is_found_in_the_training_data() -> None:
    train = [
        Task("1", {"id": 1, "prompt": "6 * 7", "answer": 42}, "train"),
        Task("h", {"instance_id": "h", "local_task_path": "/t/h", "instruction": "fix it"}, "h"),
        Task("seed-5", {"task_id": "seed-5", "level": 2}, "seeds"),
    ]
    held_out = [
        Task("x", {"answer": 42, "task_id": "x", "prompt": "6 * 7"}, "val"),
        Task("i", {"instance_id": "i", "local_task_path": "/v/i", "instruction": "fix it"}, "v"),
        Task("seed-5", {"task_id": "seed-5", "level": 2}, "other"),
        Task("2", {"prompt": "6 * 7", "answer": 41}, "val"),
        Task("seed-6", {"task_id": "seed-6", "level": 2}, "seeds"),
    ]
    stream = TaskStream([Source("all", train)], seed=0)
    assert trained_too(held_out, stream.listed()) == held_out[:3]
