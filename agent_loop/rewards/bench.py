"""Where a program or a function judges a trial: behind a wall, on a copy of what the agent left.

Invariant: a judge reads the system, its interpreter and tools, its own declared files, and the copy
(`launchers/left_files.py`); nothing that the agent wrote is on a path from which an interpreter
starts or imports: `PATH` and `PYTHONPATH` have no relative folder, the home folder and `/tmp` are
new and empty, and Python takes no module from the working directory. With `sandbox: off` nothing of
this holds: the judge runs in the agent's working directory itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from agent_loop.launchers.left_files import copy_left, remove_folder
from agent_loop.processes.environment import GPUS, behind_wall
from agent_loop.processes.host import Ended, Job, ProcessHost, own_folders
from agent_loop.processes.readable import imported, readable
from agent_loop.processes.threads import run_to_end
from agent_loop.records import Trial
from proxy import wall

_PYTHON = re.compile(r"python[\d.]*")
_PYTEST = re.compile(r"py\.?test")
_OWN_PATHS = ("PATH", "PYTHONPATH", "NODE_PATH", "LD_LIBRARY_PATH")
"""Lists of folders, in which a relative or an empty entry is the working directory."""


async def judge(
    host: ProcessHost,
    job: Job,
    trial: Trial,
    name: str,
    *,
    files: Sequence[Path] = (),
    named: Mapping[str, str] | None = None,
) -> Ended:
    """Runs a job that judges the trial.

    Args:
        job: in the agent's working directory. What is `visible` of it is the judge's alone.
        name: of the judge; several can judge the same trial at the same time.
        files: what the judge declares that it reads, besides what its command line names.
        named: the variables that the user's configuration sets.

    Raises:
        LaunchError: it could not be started.
        RewardError: what the agent left could not be copied.
    """
    if trial.wall is None:
        return await host.run(job)
    folder = trial.directory / f"{name}.files"
    try:
        await run_to_end(_make, trial, folder, any(_PYTEST.search(word) for word in job.argv))
        return await host.run(_behind_wall(job, trial, folder, files, named or {}))
    finally:
        await run_to_end(remove_folder, folder)


def _make(trial: Trial, folder: Path, tests: bool) -> None:
    for name in ("home", "tmp"):
        (folder / name).mkdir(parents=True)
    own, seen = trial.seen_at or (trial.directory, trial.directory.absolute())
    for path in (trial.workspace, trial.agent_directory):
        if path.is_dir():
            at = seen / path.relative_to(own)
            copy_left(path, at, trial.began_with, folder / path.name, tests=tests)


def _behind_wall(
    job: Job, trial: Trial, folder: Path, files: Sequence[Path], named: Mapping[str, str]
) -> Job:
    assert trial.wall is not None
    env = _without_relative(behind_wall(job.env) | dict(named)) | {"PYTHONNOUSERSITE": "1"}
    own = trial.directory.absolute()  # what the agent wrote there names nothing that is shown
    named_files = [Path(os.path.normpath(word)) for word in job.argv if os.path.isabs(word)]
    scripts = [each for each in named_files if each.is_file() and not each.is_relative_to(own)]
    declared = [each for file in (*scripts, *files) for each in imported(file)]
    shown = readable(job.argv, env, named, trial.directory)
    if env.get(GPUS) != "":
        shown += map(Path, wall.gpu_devices())
    kept = own_folders(replace(trial.wall, strict=False), folder / "home", folder / "tmp")
    copies = [trial.workspace, trial.agent_directory]
    kept += [(copy, path) for path in copies if (copy := folder / path.name).is_dir()]
    log = trial.directory / "agent.log"
    return replace(
        job,
        argv=_isolated(job.argv),
        env=env,
        wall=replace(trial.wall, strict=False),
        kept=kept,
        given=[path for path in dict.fromkeys((log, *declared)) if path.exists()],
        shown=shown,
    )


def _isolated(argv: Sequence[str]) -> list[str]:
    """The command with Python's option for a module path without the working directory. A script's
    own folder stays on the path: it is the judge's."""
    if len(argv) > 1 and _PYTHON.fullmatch(Path(argv[0]).name) and argv[1] in ("-m", "-c"):
        return [argv[0], "-P", *argv[1:]]
    return list(argv)


def _without_relative(env: Mapping[str, str]) -> dict[str, str]:
    absolute = {
        name: os.pathsep.join(part for part in env[name].split(os.pathsep) if os.path.isabs(part))
        for name in _OWN_PATHS
        if name in env
    }
    return {**env, **absolute}
