from __future__ import annotations

from pathlib import Path

import pytest

from agent_loop.errors import TaskFileError
from agent_loop.harbor_tasks import HarborDataset, read_harbor_dir, resolve_task_dir
from agent_loop.records import Task
from tests.harbor_sdk.harbor_tasks import write_task


def test_single_and_multi_step_folders_become_tasks(tmp_path: Path) -> None:
    write_task(tmp_path / "set", "b-many", steps=("first", "second"))
    write_task(tmp_path / "set", "a-one")
    (tmp_path / "set" / "notes").mkdir()
    one, many = read_harbor_dir(HarborDataset(tmp_path / "set", ability="files"))
    assert (one.task_id, one.source) == ("a-one", "set")
    assert one.data["instruction"] == "Write hello-a-one into answer.txt.\n"
    assert one.data["ability"] == "files"
    assert one.data["local_task_path"] == str(tmp_path / "set" / "a-one")
    assert many.data["steps"] == ["first", "second"]
    assert str(many.data["instruction"]).count("hello-b-many") == 2


def test_the_limit_takes_the_first_by_name(tmp_path: Path) -> None:
    for name in ("c", "a", "b"):
        write_task(tmp_path, name)
    limited = read_harbor_dir(HarborDataset(tmp_path, limit=2))
    assert [task.task_id for task in limited] == ["a", "b"]


def test_the_cache_serves_what_is_unchanged_and_never_what_is_not(tmp_path: Path) -> None:
    task = write_task(tmp_path / "set", "a")
    dataset = HarborDataset(tmp_path / "set", cache_dir=tmp_path / "cache")
    first = read_harbor_dir(dataset)
    (cached,) = (tmp_path / "cache").iterdir()
    stamp = cached.stat().st_mtime_ns
    assert read_harbor_dir(dataset) == first
    assert cached.stat().st_mtime_ns == stamp
    (task / "instruction.md").write_text("Something else.")
    assert read_harbor_dir(dataset)[0].data["instruction"] == "Something else."
    assert len(list((tmp_path / "cache").iterdir())) == 2


@pytest.mark.parametrize("missing", ["instruction.md", "environment"])
def test_a_task_that_is_not_whole_is_named(tmp_path: Path, missing: str) -> None:
    task = write_task(tmp_path, "a")
    (task / missing).rename(tmp_path / "elsewhere")
    with pytest.raises(TaskFileError, match=f"a.*{missing}"):
        read_harbor_dir(HarborDataset(tmp_path))


def test_a_broken_task_file_is_named(tmp_path: Path) -> None:
    (write_task(tmp_path, "a") / "task.toml").write_text("[[[")
    with pytest.raises(TaskFileError, match=r"a/task\.toml"):
        read_harbor_dir(HarborDataset(tmp_path))


def test_no_folder_and_no_task(tmp_path: Path) -> None:
    with pytest.raises(TaskFileError, match="not a folder"):
        read_harbor_dir(HarborDataset(tmp_path / "none"))
    with pytest.raises(TaskFileError, match="no Harbor task"):
        read_harbor_dir(HarborDataset(tmp_path))


def test_own_path_then_roots_in_order_then_the_template(tmp_path: Path) -> None:
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
