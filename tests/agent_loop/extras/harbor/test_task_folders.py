from __future__ import annotations

from pathlib import Path

import pytest

from agent_loop.errors import TaskFileError
from agent_loop.extras.harbor.task_folders import (
    HarborDataConfig,
    read_harbor_dir,
    resolve_task_dir,
)
from agent_loop.records import Task
from agent_loop.tasks import DataConfig, held_out_tasks, training_tasks
from tests.harbor_sdk.harbor_tasks import write_task


def test_single_and_multi_step_folders_become_tasks(tmp_path: Path) -> None:
    write_task(tmp_path / "set", "b-many", steps=("first", "second"))
    write_task(tmp_path / "set", "a-one")
    (tmp_path / "set" / "notes").mkdir()
    one, many = read_harbor_dir(tmp_path / "set", HarborDataConfig(ability="files"))
    assert (one.task_id, one.source) == ("a-one", "set")
    assert one.data["instruction"] == "Write hello-a-one into answer.txt.\n"
    assert one.data["ability"] == "files"
    assert one.data["local_task_path"] == str(tmp_path / "set" / "a-one")
    assert many.data["steps"] == ["first", "second"]
    assert str(many.data["instruction"]).count("hello-b-many") == 2


def test_limit_takes_the_first_by_name(tmp_path: Path) -> None:
    for name in ("c", "a", "b"):
        write_task(tmp_path, name)
    limited = read_harbor_dir(tmp_path, HarborDataConfig(), limit=2)
    assert [task.task_id for task in limited] == ["a", "b"]


def test_cache_is_used_for_unchanged_tasks_and_never_for_changed_ones(tmp_path: Path) -> None:
    task = write_task(tmp_path / "set", "a")
    folder, config = tmp_path / "set", HarborDataConfig(cache_dir=tmp_path / "cache")
    first = read_harbor_dir(folder, config)
    (cached,) = (tmp_path / "cache").iterdir()
    stamp = cached.stat().st_mtime_ns
    assert read_harbor_dir(folder, config) == first
    assert cached.stat().st_mtime_ns == stamp
    (task / "instruction.md").write_text("Something else.")
    assert read_harbor_dir(folder, config)[0].data["instruction"] == "Something else."
    assert len(list((tmp_path / "cache").iterdir())) == 2


@pytest.mark.parametrize("missing", ["instruction.md", "environment"])
def test_incomplete_task_is_refused_with_its_path(tmp_path: Path, missing: str) -> None:
    task = write_task(tmp_path, "a")
    (task / missing).rename(tmp_path / "elsewhere")
    with pytest.raises(TaskFileError, match=f"a.*{missing}"):
        read_harbor_dir(tmp_path, HarborDataConfig())


def test_broken_task_toml_is_refused_with_its_path(tmp_path: Path) -> None:
    (write_task(tmp_path, "a") / "task.toml").write_text("[[[")
    with pytest.raises(TaskFileError, match=r"a/task\.toml"):
        read_harbor_dir(tmp_path, HarborDataConfig())


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ("[[steps]]\ntitle = 'a'\n", "needs a name"),
        ("steps = ['a']\n", "needs a name"),
        ("[[steps]]\nname = 3\n", "needs a name"),
        ("[metadata]\nseed = 36893488147419103232\n", "metadata: Integer exceeds"),
    ],
)
def test_task_toml_of_another_form_is_refused_with_its_path(
    toml: str, said: str, tmp_path: Path
) -> None:
    (write_task(tmp_path, "a") / "task.toml").write_text(toml)
    with pytest.raises(TaskFileError, match=rf"a/task\.toml.*{said}"):
        read_harbor_dir(tmp_path, HarborDataConfig())


def test_instruction_that_is_not_text_is_refused_with_its_path(tmp_path: Path) -> None:
    (write_task(tmp_path, "a") / "instruction.md").write_bytes(b"caf\xe9")
    with pytest.raises(TaskFileError, match=r"a/instruction\.md: not UTF-8"):
        read_harbor_dir(tmp_path, HarborDataConfig())


def test_missing_folder_and_folder_without_tasks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskFileError, match="not a folder"):
        read_harbor_dir(tmp_path / "none", HarborDataConfig())
    with pytest.raises(TaskFileError, match="no Harbor task"):
        read_harbor_dir(tmp_path, HarborDataConfig())


def test_task_folder_is_found_by_its_own_path_then_the_roots_then_the_template(
    tmp_path: Path,
) -> None:
    roots = [tmp_path / "train", tmp_path / "val"]
    own = write_task(tmp_path / "own", "t-1")
    in_val = write_task(roots[1], "t-1")
    by_template = write_task(tmp_path / "more", "x-t-1")
    template = f"{tmp_path}/more/x-{{instance_id}}"

    def found(**data: str) -> Path | None:
        task = Task("t-1", {"instance_id": "t-1", **data})
        return resolve_task_dir(task, roots, template)

    assert found(local_task_path=str(own)) == own
    assert found(local_task_path=str(tmp_path / "gone")) == in_val
    in_train = write_task(roots[0], "t-1")
    assert found() == in_train
    assert found(instance_id="t-2") is None
    (in_train / "task.toml").unlink()
    (in_val / "task.toml").unlink()
    assert found() == by_template


def test_limits_and_the_source_of_training_and_held_out_tasks(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write_task(tmp_path / "train", name)
        write_task(tmp_path / "val", f"v-{name}")
    folders = HarborDataConfig(
        train_dir=(tmp_path / "train",),
        val_dir=(tmp_path / "val",),
        train_limit=2,
        val_limit=1,
        data_source="shell",
    )
    data = DataConfig(harbor=folders, shuffle=False)
    stream = training_tasks(data)
    drawn = [stream.draw() for _ in range(4)]
    assert [task.task_id for task in drawn] == ["a", "b", "a", "b"]
    assert {task.source for task in drawn} == {"shell"}
    assert [(task.task_id, task.source) for task in held_out_tasks(data)] == [("v-a", "shell")]
