"""The task source `harbor`: a dataset of a Harbor registry, by its name."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from agent_loop.errors import TaskFileError
from agent_loop.extras.harbor.task_folders import HarborDataConfig, read_harbor_dir
from agent_loop.task_sources.listed import ListedTasks
from agent_loop.task_sources.protocol import TaskSourceConfig
from harbor_sdk.registry import RegistryError, download_dataset


class HarborTasks(TaskSourceConfig):
    """A dataset of a Harbor registry, which is downloaded once.

    Example: HarborTasks(dataset="terminal-bench@2.0", program=".harbor/bin/harbor")
    """

    dataset: str = Field(pattern=r"^\w[\w.-]*(/\w[\w.-]*)?(@[\w.-]+)?$")
    """`name@version`, or `name` for the newest version at the time of the download."""
    registry: str | None = None
    """A `registry.json`, or its URL. None: Harbor's own registry."""
    folder: Path = Path("harbor-datasets")
    """Folder in which the tasks are kept."""
    program: str = ".harbor/bin/harbor"
    """Harbor's program."""

    @property
    def private_files(self) -> tuple[Path, ...]:
        return (self.folder,)

    def build(self, name: str, *, seed: int, shuffle: bool) -> ListedTasks:
        """
        Raises:
            TaskFileError: the dataset cannot be downloaded, or a task is incomplete.
        """
        try:
            root = download_dataset(
                self.dataset, self.folder, registry=self.registry, program=self.program
            )
        except RegistryError as error:
            raise TaskFileError(f"{name}: {error}") from error
        tasks = read_harbor_dir(root, HarborDataConfig(data_source=name))
        return ListedTasks(name, tasks, seed=seed, shuffle=shuffle)
