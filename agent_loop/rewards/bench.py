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
_RUNS_TEXT = re.compile(r"-[A-Za-z]*[mc]")
"""An option of Python after which a module or a text runs, whose folder is the working one."""
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
_SCRIPT_BYTES = 1 << 20
_SAFE = {
    "PYTHONNOUSERSITE": "1",
    "PYTHONSAFEPATH": "1",
    "GIT_CONFIG_COUNT": "2",
    "GIT_CONFIG_KEY_0": "core.fsmonitor",
    "GIT_CONFIG_VALUE_0": "false",
    "GIT_CONFIG_KEY_1": "core.hooksPath",
    "GIT_CONFIG_VALUE_1": os.devnull,
}
"""Python, however deep it is started, takes no module from the working directory, and Git runs no
program that a repository names."""
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
        await run_to_end(_make, trial, folder, _runs_pytest(job, trial, files))
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
    scripts = _scripts(job, trial)
    env = _SAFE | _without_relative(behind_wall(job.env) | dict(named))
    # A script imports what lies beside it.
    places = [*dict.fromkeys(str(each.parent) for each in scripts), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, places))
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


def _scripts(job: Job, trial: Trial) -> list[Path]:
    """The files that the command line names. What the agent wrote names nothing that is shown."""
    own = trial.directory.absolute()
    named = [Path(os.path.normpath(word)) for word in job.argv if os.path.isabs(word)]
    return [each for each in named if each.is_file() and not each.is_relative_to(own)]


def _runs_pytest(job: Job, trial: Trial, files: Sequence[Path]) -> bool:
    """Whether the command line, or a file of the judge, names pytest."""
    if any(_PYTEST.search(word) for word in job.argv):
        return True
    own = (each for each in (*_scripts(job, trial), *files) if each.is_file())
    short = (each for each in own if each.stat().st_size <= _SCRIPT_BYTES)
    return any(_PYTEST.search(each.read_text("utf-8", errors="replace")) for each in short)


def _isolated(argv: Sequence[str]) -> list[str]:
    """The command with Python's option for a module path without the working directory. A script's
    own folder stays on the path: it is the judge's."""
    if argv and _PYTHON.fullmatch(Path(argv[0]).name):
        words = iter(argv[1:])
        for word in words:
            if word in _WITH_VALUE:
                next(words, None)
            elif word == "-" or _RUNS_TEXT.match(word):
                return [argv[0], "-P", *argv[1:]]
            elif not word.startswith("-"):
                break
    return list(argv)


def _without_relative(env: Mapping[str, str]) -> dict[str, str]:
    absolute = {
        name: os.pathsep.join(part for part in env[name].split(os.pathsep) if os.path.isabs(part))
        for name in _OWN_PATHS
        if name in env
    }
    return {**env, **absolute}
