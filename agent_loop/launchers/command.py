"""The `command` launcher: any program, in a process group and working directory of its own.

Invariant: the program gets its environment and its arguments and nothing else. When `run`
returns, the program and all its descendants have ended (see `processes/supervisor.py`), and its
output is in `agent.log`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import Field

from agent_loop.launchers.agent_process import ProgramConfig, agent_result, run_agent
from agent_loop.launchers.protocol import OVERHEAD_S, LauncherConfig
from agent_loop.launchers.workspace import GIT
from agent_loop.processes.host import PROCESS, ProcessConfig, ProcessHost
from agent_loop.records import AgentResult, Trial
from proxy.errors import ConfigurationError
from proxy.settings.section import Common

_SCRIPTS = (".py", ".sh", ".js", ".mjs", ".cjs", ".ts", ".rb", ".pl")
"""Ends of the names of programs that an interpreter runs."""


class ArgvConfig(ProgramConfig, LauncherConfig):
    """What the sections of launchers that start a program have in common."""

    argv: Common[tuple[str, ...]] = Field(min_length=1)
    """The program and its arguments. Placeholders such as `{task_file}`, `{prompt}` and
    `{task.FIELD}` are replaced."""

    @property
    def needs_prompt(self) -> bool:
        """True if the command contains `{prompt}` or TASK_PROMPT."""
        texts = (*self.argv, *self.env.values())
        return any("{prompt}" in text or "TASK_PROMPT" in text for text in texts)


class CommandConfig(ArgvConfig):
    """Example: CommandConfig(argv=("python", "agent.py", "--task", "{task_file}"))"""

    @property
    def is_local(self) -> bool:
        return True

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(scripts(self.argv))

    def build(self, process: ProcessConfig = PROCESS) -> CommandLauncher:
        return CommandLauncher(self, process)


class CommandLauncher:
    """Runs each trial's program in a process of its own."""

    overhead_s = OVERHEAD_S

    def __init__(self, settings: CommandConfig, process: ProcessConfig = PROCESS) -> None:
        """Raises ConfigurationError: the program, or the template folder, does not exist."""
        self._settings = settings
        self._process = process
        self._host = ProcessHost()
        program, template = settings.argv[0], settings.template
        if "{" not in program and shutil.which(program) is None:
            raise ConfigurationError(
                f"agent command {program!r} is not an executable on PATH; "
                "install it, or give its full path"
            )
        is_folder = template and "{" not in template and not template.startswith(GIT)
        if template and is_folder and not Path(template).is_dir():
            raise ConfigurationError(
                f"agent template {template!r} is not a folder; give an existing folder, or "
                "git+REPOSITORY#REVISION"
            )

    async def run(self, trial: Trial) -> AgentResult:
        return agent_result(
            await run_agent(
                self._host, trial, self._settings, self._process, argv=self._settings.argv
            )
        )

    async def close(self) -> None:
        await self._host.close()


def scripts(argv: Sequence[str]) -> Iterator[Path]:
    """The scripts among a command's arguments. The program itself counts only if it is a script,
    because agents need the interpreters, too."""
    for number, word in enumerate(argv):
        path = word.replace("{root}", str(Path.cwd()))
        if os.path.isfile(path) and (number > 0 or _is_script(path)):
            yield Path(path).absolute()


def misplaced_script(
    argv: Sequence[str], template: str | None, *, made_in_trial: bool
) -> str | None:
    """The first argument that names a script which is not where the program will look for it: in
    the trial's working folder, a copy of `template`. None if there is none, or it cannot be known.
    `made_in_trial`: whether a script that exists nowhere may be made there before it is run."""
    if template and (template.startswith(GIT) or "{" in template):
        return None
    for number, word in enumerate(argv):
        is_path = number == 0 and "/" in word
        if "{" in word or os.path.isabs(word) or not (is_path or word.endswith(_SCRIPTS)):
            continue
        if template and os.path.isfile(os.path.join(template, word)):
            continue
        is_run = is_path or (number == 1 and not made_in_trial)
        if os.path.isfile(word) or is_run:
            return word
    return None


def _is_script(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(2) == b"#!"
