"""Every launcher, by its key under `remote_agent`.

To add a launcher, write a module with its section (a `LauncherConfig`) and its class, and add a
field here. A launcher outside this package needs no field: name it in `remote_agent.launcher`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

from pydantic import model_validator

from agent_loop.extras.environments.openenv import OpenEnvConfig
from agent_loop.extras.environments.verifiers import VerifiersConfig
from agent_loop.extras.harbor.launcher import HarborConfig, HarborLauncher
from agent_loop.extras.kubernetes.launcher import KubernetesConfig
from agent_loop.extras.ray.launcher import RayConfig
from agent_loop.launchers.command import CommandConfig
from agent_loop.launchers.http import HttpConfig
from agent_loop.launchers.protocol import Launcher, LauncherConfig
from agent_loop.launchers.python import PythonConfig
from agent_loop.outside_parts import OutsidePart
from proxy.errors import ConfigurationError


class OutsideLauncher(OutsidePart, LauncherConfig):
    """A launcher of your own, named by the class of its section."""

    kind = "launcher"

    def build(self) -> Launcher:
        return self.section(LauncherConfig).build()


class AgentConfig(HarborConfig):
    """The agent: one of the launchers below, or an agent of Harbor by `agent_name` or
    `agent_import_path`.

    Example: AgentConfig(command=CommandConfig(argv=("python", "agent.py"))).build_launcher()
    """

    command: CommandConfig | None = None
    """A program: `command.argv` starts it, and its environment describes the trial."""
    python: PythonConfig | None = None
    """A Python function, `python.target`, in a process of its own."""
    http: HttpConfig | None = None
    """A service that runs agents, at `http.url`."""
    kubernetes: KubernetesConfig | None = None
    """A pod of a Kubernetes Job for each trial, from `kubernetes.image`."""
    ray: RayConfig | None = None
    """A program in a task of a Ray cluster for each trial: `ray.argv` starts it."""
    verifiers: VerifiersConfig | None = None
    """An environment of the package `verifiers`: `verifiers.env`. It brings tasks and rewards."""
    openenv: OpenEnvConfig | None = None
    """An environment of an OpenEnv server, at `openenv.url`. It gives the rewards."""
    launcher: OutsideLauncher | None = None
    """A launcher of your own: `launcher.target` names the class of its section."""

    @property
    def agents(self) -> list[str]:
        """The keys that configure an agent: one key, or none if a swarm's clients run agents."""
        harbor = [name for name in (self.agent_name, self.agent_import_path) if name]
        names = ["agent_name" if self.agent_name else "agent_import_path"] if harbor else []
        return [*self._launchers(), *names]

    def build_launcher(self, task_roots: Sequence[Path] = ()) -> Launcher:
        """`task_roots` are folders that hold Harbor task folders.

        Raises:
            ConfigurationError: no agent is configured, or its launcher refuses its settings.
        """
        for section in self._launchers().values():
            return section.build()
        if not self.agents:
            raise ConfigurationError(
                "remote_agent: no agent: set command.argv to the program that starts it, or one of "
                "python, http, kubernetes, ray, agent_name, launcher"
            )
        return HarborLauncher(self, task_roots)

    @property
    def needs_prompt(self) -> bool:
        """Whether the agent needs a prompt to run a task."""
        return any(section.needs_prompt for section in self._launchers().values())

    def _launchers(self) -> dict[str, LauncherConfig]:
        return {name: value for name, value in self if isinstance(value, LauncherConfig)}

    @model_validator(mode="after")
    def _one_launcher(self) -> Self:
        if len(self.agents) > 1:
            raise ValueError(
                f"several agents: remote_agent.{', remote_agent.'.join(self.agents)}; configure one"
            )
        return self
