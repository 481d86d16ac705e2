"""Tasks of a Harbor registry by name, with the real Harbor and a copy of a registry."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from agent_loop.errors import TaskFileError
from agent_loop.tasks import DataConfig, held_out_tasks
from tests.harbor_sdk.harbor_tasks import write_task
from tests.needs import needs

HARBOR = Path(__file__).parents[2] / ".harbor/bin/harbor"
pytestmark = needs(None if HARBOR.exists() else "run make harbor (Python 3.12)")


def git(folder: Path, *words: str) -> str:
    own = ("-c", "user.name=a", "-c", "user.email=a@localhost")
    command = ["git", "-C", str(folder), *own, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    """A registry whose dataset has two tasks of a git repository."""
    repository = tmp_path / "repository"
    for name in ("one", "two"):
        write_task(repository / "tasks", name)
    git(repository, "init", "-q")
    git(repository, "add", "-A")
    git(repository, "commit", "-qm", "tasks")
    where = {"git_url": repository.as_uri(), "git_commit_id": git(repository, "rev-parse", "HEAD")}
    tasks = [{"name": name, "path": f"tasks/{name}", **where} for name in ("one", "two")]
    dataset = {"name": "small", "version": "1.0", "description": "", "tasks": tasks}
    file = tmp_path / "registry.json"
    file.write_text(json.dumps([dataset]))
    return file


def data(registry: Path, folder: Path, dataset: str = "small@1.0") -> DataConfig:
    section = {
        "dataset": dataset,
        "registry": str(registry),
        "folder": str(folder),
        "program": str(HARBOR),
    }
    return DataConfig.model_validate({"val_sources": {"bench": {"harbor": section}}})


def test_dataset_is_downloaded_by_its_name_and_then_kept(registry: Path, tmp_path: Path) -> None:
    named = data(registry, tmp_path / "kept")
    tasks = held_out_tasks(named)
    assert [task.task_id for task in tasks] == ["one", "two"]
    assert {task.source for task in tasks} == {"bench"}
    folder = Path(tasks[0].data["local_task_path"])
    assert folder == tmp_path / "kept/small@1.0/one"
    assert (folder / "task.toml").is_file()
    registry.unlink()
    assert held_out_tasks(named) == tasks


def test_dataset_that_the_registry_does_not_have_is_refused_in_one_line(
    registry: Path, tmp_path: Path
) -> None:
    with pytest.raises(TaskFileError, match=r"bench: none@1\.0: .*'none'.* not found") as error:
        held_out_tasks(data(registry, tmp_path / "kept", "none@1.0"))
    assert "\n" not in str(error.value)
    assert list((tmp_path / "kept").iterdir()) == []
