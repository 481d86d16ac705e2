"""What every agent finds in its trial's directory: a working directory and a task file."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import orjson

from agent_loop.errors import LaunchError
from agent_loop.launchers.left_files import keep_configuration
from agent_loop.processes.environment import expand
from agent_loop.processes.threads import run_to_end
from agent_loop.records import Trial

GIT = "git+"
GIT_TIMEOUT_S = 600.0
"""Seconds for a checkout, enough for a clone over a slow network; not part of the agent's time."""


async def make_workspace(trial: Trial, template: str | None) -> None:
    """Writes the task file, and makes the agent's directory and the working directory: an empty
    one, a copy of the template folder, or a checkout (`git+REPOSITORY#REVISION`).

    Raises:
        LaunchError: the folder or revision does not exist, or a file cannot be written.
    """
    await run_to_end(_make_workspace, trial, template)


def _make_workspace(trial: Trial, template: str | None) -> None:
    trial.task_file.write_bytes(orjson.dumps(trial.agent_data, default=str))
    try:
        trial.agent_directory.mkdir()
        if trial.wall is not None and not trial.wall.strict:
            trial.home.mkdir()
            trial.temporary.mkdir()
        if template is None:
            trial.workspace.mkdir()
        elif template.startswith(GIT):
            _checkout(expand(template, trial), trial.workspace)
        else:
            source = Path(expand(template, trial))
            shutil.copytree(source, trial.workspace, symlinks=True)
        keep_configuration(trial.workspace, trial.began_with)
    except (OSError, shutil.Error) as error:
        raise LaunchError(f"cannot make the working directory {trial.workspace}: {error}") from None


def _checkout(source: str, folder: Path) -> None:
    repository, _, revision = source.removeprefix(GIT).partition("#")
    for command in (
        # With hard links an agent could change the objects of the repository that is cloned.
        ["clone", "--quiet", "--no-checkout", "--no-hardlinks", "--", repository, str(folder)],
        ["-C", str(folder), "checkout", "--quiet", "--detach", revision or "HEAD", "--"],
    ):
        try:
            subprocess.run(
                ["git", *command],
                check=True,
                capture_output=True,
                text=True,
                timeout=GIT_TIMEOUT_S,
                stdin=subprocess.DEVNULL,
                encoding="utf-8",
            )
        except subprocess.CalledProcessError as error:
            raise LaunchError(f"cannot check out {source!r}: {error.stderr.strip()}") from None
        except subprocess.TimeoutExpired:
            raise LaunchError(
                f"cannot check out {source!r}: not finished after {GIT_TIMEOUT_S:.0f} s"
            ) from None
