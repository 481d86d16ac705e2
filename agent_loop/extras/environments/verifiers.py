"""The `verifiers` launcher: a trial is an episode of an environment of the package `verifiers`.

The environment runs in the Python that it is installed in: its own harness calls the model through
the trial's session, and its own rewards judge the episode. Invariant: an episode that the
environment could not finish fails the trial; it is not a reward of 0.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from agent_loop.errors import LaunchError, TaskFileError
from agent_loop.launchers.agent_process import ProgramConfig, agent_result, call_agent
from agent_loop.launchers.protocol import OVERHEAD_S, HeldOut, LauncherConfig, OwnTasks
from agent_loop.processes.environment import inherited_environment
from agent_loop.processes.functions import RETURNED_BYTES, returned
from agent_loop.processes.host import PROCESS, Ended, ProcessConfig, ProcessHost
from agent_loop.processes.readable import installation
from agent_loop.records import AgentResult, Trial
from proxy.errors import ConfigurationError
from proxy.settings.section import Section

PROGRAM = "agent_loop.extras.environments.verifiers_agent"
FIELD = "verifiers"
"""The field of a task that holds the environment's own data, with the answer."""

_PACKAGE = (
    "import sys, types\n"
    "package = sys.modules['agent_loop'] = types.ModuleType('agent_loop')\n"
    f"package.__path__ = [{str(Path(__file__).parents[1])!r}]\n"
    "from importlib import import_module\n"
)
"""Makes this package importable in another Python, without the packages that are installed here."""


class VerifiersEnvironment(Section):
    """An environment, and where it is installed.

    Example: VerifiersEnvironment(env="gsm8k-v1", python=".cache/verifiers/bin/python")
    """

    env: str = Field(min_length=1)
    """Name of the environment's package (its taskset), as `vf-eval` takes it."""
    python: Path = Path("python")
    """The Python in which `verifiers` and the environment are installed."""
    path: tuple[Path, ...] = ()
    """Folders with environments that are not installed."""
    harness: str | None = None
    """The harness of every seat, such as `null`, which chats and calls the environment's tools;
    None: the environment's own, or `bash`, which runs the model's commands."""
    settings: Mapping[str, Any] = Field(default_factory=dict)
    """More settings of the environment, as in the block `env` of verifiers' own configuration:
    `taskset`, a block for each seat, …"""

    @property
    def env_settings(self) -> dict[str, Any]:
        """The settings in the form of verifiers' own configuration."""
        taskset = {"id": self.env, **self.settings.get("taskset", {})}
        return {**self.settings, "taskset": taskset}

    @property
    def inherited(self) -> dict[str, str]:
        """The environment variables of a process of this Python."""
        found = inherited_environment()
        found["PATH"] = f"{self.python.absolute().parent}:{found.get('PATH', '')}"
        found["PYTHONPATH"] = ":".join(str(path.absolute()) for path in self.path)
        return found

    def argv(self, function: str) -> tuple[str, ...]:
        """The command that calls `function` (`module:function`) in this Python."""
        module, _, name = function.partition(":")
        return (str(self.python), "-c", f"{_PACKAGE}import_module({module!r}).{name}()")

    def tasks(self, limit: int) -> Iterator[Mapping[str, Any]]:
        """The data of the first `limit` tasks, one by one.

        Raises:
            TaskFileError: the environment cannot list its tasks.
        """
        command = [*self.argv(f"{PROGRAM}:main"), json.dumps(self.env_settings), str(limit)]
        with tempfile.TemporaryFile() as errors:
            with subprocess.Popen(
                command, env=self.inherited, stdout=subprocess.PIPE, stderr=errors
            ) as process:
                assert process.stdout is not None
                try:
                    for line in process.stdout:
                        yield json.loads(line)
                    process.wait()
                finally:
                    process.kill()  # the reader may not want all of them
            if process.returncode != 0:
                errors.seek(0)
                last = errors.read().decode(errors="replace").strip().splitlines()[-1:]
                raise TaskFileError(
                    f"verifiers environment {self.env!r}: cannot list its tasks with "
                    f"{self.python}: {''.join(last) or f'exit code {process.returncode}'}"
                )


class VerifiersConfig(VerifiersEnvironment, HeldOut, LauncherConfig):
    """Example: VerifiersConfig(env="gsm8k-v1", harness="null")"""

    program: ProgramConfig = ProgramConfig()
    """The process of an episode."""

    @property
    def is_local(self) -> bool:
        return True

    @property
    def folders(self) -> tuple[Path, ...]:
        return (*installation(self.python.absolute()), *self.path)

    @property
    def hidden_fields(self) -> frozenset[str]:
        return frozenset({FIELD})

    @property
    def own_tasks(self) -> OwnTasks:
        names = VerifiersEnvironment.model_fields
        shared, first = {name: getattr(self, name) for name in names}, self.held_out
        held_out = {"verifiers": {**shared, "take": first}} if first else None
        return OwnTasks(self.env, {"verifiers": {**shared, "skip": first}}, held_out)

    def build(self, process: ProcessConfig = PROCESS) -> VerifiersLauncher:
        return VerifiersLauncher(self, process)


class VerifiersLauncher:
    """Plays each trial as an episode, in a process of its own."""

    overhead_s = OVERHEAD_S

    def __init__(self, settings: VerifiersConfig, process: ProcessConfig = PROCESS) -> None:
        """Raises ConfigurationError: there is no such Python."""
        if shutil.which(str(settings.python)) is None:
            raise ConfigurationError(
                f"remote_agent.verifiers.python: {str(settings.python)!r} is not an executable; "
                "give the Python of the environment in which verifiers is installed"
            )
        self._settings = settings
        self._process = process
        own = {name: settings.inherited[name] for name in ("PATH", "PYTHONPATH")}
        env = {**own, **settings.program.env}
        self._program = settings.program.model_copy(update={"env": env})
        self._host = ProcessHost(
            settings.argv("agent_loop.processes.function_server:main"),
            (f"{PROGRAM}:VerifiersCall", f"{PROGRAM}:play"),
            settings.inherited,
        )

    def start(self) -> None:
        self._host.start()

    async def run(self, trial: Trial) -> AgentResult:
        settings, data = self._settings, trial.task.data
        if FIELD not in data:
            raise LaunchError(
                f"task {trial.task.task_id!r} has no field {FIELD!r}; tasks of the launcher "
                "verifiers come from a source of the same kind"
            )
        argument = {
            "env": settings.env_settings,
            "harness": settings.harness,
            "data": data[FIELD],
            "base_url": trial.base_url,
            "model": trial.model,
            "seed": trial.seed,
        }
        ended, result = await call_agent(self._host, trial, self._program, self._process, argument)
        if error := _error(ended, result):
            raise LaunchError(f"verifiers environment {settings.env!r}: {error}")
        return agent_result(ended, returned(ended, result, settings.env, "reward"))

    async def close(self) -> None:
        await self._host.close()


def _error(ended: Ended, result: Path) -> str | None:
    """Why the environment did not finish the episode; None: it did, or it was ended."""
    if ended.failure is not None or result.stat().st_size > RETURNED_BYTES:
        return None
    try:
        value = json.loads(result.read_bytes())
    except ValueError:  # the agent can write into its file; `returned` reports it
        return None
    return str(value["error"]) if isinstance(value, dict) and "error" in value else None
