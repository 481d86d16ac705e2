"""Tasks from datasets: mapped columns, an order by the seed, resuming, and errors in one line."""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from agent_loop.errors import TaskFileError
from agent_loop.records import Task
from agent_loop.task_sources.dataset import DatasetTasks, DatasetTasksConfig
from agent_loop.tasks import DataConfig, TaskStream, held_out_tasks, training_tasks
from proxy.errors import ConfigurationError

ROWS = 230


def write(folder: Path, form: str) -> Path:
    """Two files with `ROWS` questions in all."""
    folder.mkdir()
    rows = [{"question": f"q{n}", "extra": {"answer": str(n)}} for n in range(ROWS)]
    halves = rows[:130], rows[130:]
    for number, half in enumerate(halves):
        if form == "parquet":
            table = pa.Table.from_pylist(half)
            pq.write_table(table, folder / f"part-{number}.parquet", row_group_size=20)
        elif form == "jsonl":
            text = "".join(json.dumps(row) + "\n" for row in half)
            (folder / f"part-{number}.jsonl").write_text(text)
    if form == "saved":
        datasets.Dataset.from_list(rows).save_to_disk(str(folder))
    return folder


@pytest.fixture(params=["parquet", "jsonl", "saved"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write(tmp_path / "questions", request.param)


def source(path: Path | str, **more: Any) -> DatasetTasks:
    columns = {"prompt": "question", "answer": "extra.answer"}
    config = DatasetTasksConfig(path=str(path), columns=columns, shuffle_rows=50)
    return config.model_copy(update=more).build("asked", seed=3, shuffle=True)


def stream(path: Path, **more: Any) -> TaskStream:
    section = {"path": str(path), "columns": {"prompt": "question"}, "shuffle_rows": 50, **more}
    return training_tasks(DataConfig.model_validate({"train_sources": {"a": {"dataset": section}}}))


def test_epoch_has_each_row_once_with_its_columns_mapped(folder: Path) -> None:
    tasks = list(source(folder).epoch(0))
    assert {task.data["answer"] for task in tasks} == {str(n) for n in range(ROWS)}
    assert len({task.task_id for task in tasks}) == len(tasks) == ROWS
    assert all(task.prompt == f"q{task.data['answer']}" for task in tasks)
    assert set(tasks[0].data) == {"task_id", "prompt", "answer"}


def test_order_depends_on_seed_and_epoch_alone(folder: Path) -> None:
    first = [task.data["answer"] for task in source(folder).epoch(0)]
    assert first == [task.data["answer"] for task in source(folder).epoch(0)]
    second = [task.data["answer"] for task in source(folder).epoch(1)]
    assert first != second
    assert first != sorted(first, key=int)
    assert sorted(first) == sorted(second)


def test_without_shuffle_the_order_is_that_of_the_files(folder: Path) -> None:
    config = DatasetTasksConfig(path=str(folder), columns={"n": "extra.answer"})
    tasks = config.build("asked", seed=3, shuffle=False).epoch(0)
    assert [task.data["n"] for task in tasks] == [str(n) for n in range(ROWS)]


@pytest.mark.parametrize("draws", [0, 49, 50, 137, ROWS, 3 * ROWS - 1])
def test_restored_stream_continues_with_the_same_tasks(folder: Path, draws: int) -> None:
    tasks = stream(folder)
    for _ in range(draws):
        tasks.draw()
    state = json.loads(json.dumps(tasks.state()))
    expected = [tasks.draw() for _ in range(ROWS)]
    restored = stream(folder)
    restored.restore(state)
    assert [restored.draw() for _ in range(ROWS)] == expected


def test_resuming_does_not_read_what_is_before_the_position(tmp_path: Path) -> None:
    tasks = stream(write(tmp_path / "questions", "parquet"))
    for _ in range(ROWS - 5):
        tasks.draw()
    state = tasks.state()
    expected = [tasks.draw() for _ in range(5)]
    at = state["a"]["position"]["tasks"]["start"]
    config = DatasetTasksConfig(path=str(tmp_path / "questions"))
    order = config.build("a", seed=0, shuffle=True).order(2, 0, 1)
    assert at["file"] == 1
    restored = stream(tmp_path / "questions")
    (tmp_path / "questions" / f"part-{order[0]}.parquet").write_bytes(b"no Parquet any more")
    restored.restore(state)
    assert {task.task_id for task in expected} == {restored.draw().task_id for _ in range(5)}


def test_file_of_the_dataset_can_be_named_instead_of_its_folder(folder: Path) -> None:
    files = sorted(folder.glob("part-1.*"))
    for file in files:  # none of a saved dataset
        assert len(list(source(file).epoch(0))) == ROWS - 130


def test_held_out_tasks_are_the_first_rows(folder: Path) -> None:
    section = {"limit": 7, "dataset": {"path": str(folder), "columns": {"n": "extra.answer"}}}
    data = DataConfig.model_validate({"val_sources": {"asked": section}})
    assert [task.data["n"] for task in held_out_tasks(data)] == [str(n) for n in range(7)]
    assert data.private_files == (folder,)


def test_only_rows_that_are_drawn_are_read(tmp_path: Path) -> None:
    config = DatasetTasksConfig(path=str(write(tmp_path / "q", "parquet")), shuffle_rows=5)
    epoch = config.build("asked", seed=0, shuffle=True).epoch(0)
    assert len(list(islice(epoch, 12))) == 12
    assert epoch.position["windows"] == 2
    assert epoch.position["start"]["row"] == 10


def images(folder: Path) -> Path:
    folder.mkdir()
    table = pa.table({"image": pa.array([b"\x00"]), "question": ["q"]})
    pq.write_table(table, folder / "a.parquet")
    return folder


def test_value_without_a_json_form_is_refused(tmp_path: Path) -> None:
    folder = images(tmp_path / "images")
    with pytest.raises(TaskFileError, match=r"a row cannot be written as JSON .* in columns"):
        list(DatasetTasksConfig(path=str(folder)).build("a", seed=0, shuffle=True).epoch(0))
    mapped = DatasetTasksConfig(path=str(folder), columns={"prompt": "question"})
    (task,) = mapped.build("a", seed=0, shuffle=True).epoch(0)
    assert task == Task("a-0-0-0", {"task_id": "a-0-0-0", "prompt": "q"}, "a")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"path": "none"}, r"none: no such file or folder; a dataset of the hub is hf://"),
        ({"split": "validation"}, r"cannot open it: Bad split: validation\. Available .*train"),
        ({"columns": {"prompt": "text"}}, r"columns \['text'\] are not .* it has \['question', "),
    ],
)
def test_wrong_settings_are_refused_in_one_line(
    tmp_path: Path, settings: dict[str, Any], expected: str
) -> None:
    folder = write(tmp_path / "questions", "parquet")
    config = DatasetTasksConfig.model_validate({"path": str(folder), **settings})
    with pytest.raises(ConfigurationError, match=expected) as error:
        config.build("a", seed=0, shuffle=True)
    assert "\n" not in str(error.value)


def test_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigurationError, match=r"run `pip install datasets`"):
        DatasetTasksConfig(path=str(tmp_path)).build("a", seed=0, shuffle=True)


def test_unreachable_hub_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("Name or service not known\nAn error happened")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ConfigurationError, match=r"hub cannot be reached; download") as error:
        DatasetTasksConfig(path="hf://openai/gsm8k@main").build("a", seed=0, shuffle=True)
    assert "\n" not in str(error.value)
