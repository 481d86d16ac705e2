"""Every launcher, by its key under `remote_agent`.

To add a launcher, write a module with its section (a `LauncherConfig`) and its class, and add a
field here, which names the class of its section, so that this is imported only if the key is set.
A launcher outside this package needs no field: name it in `remote_agent.launcher`.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import model_validator

from agent_loop.launchers.command import CommandConfig
from agent_loop.launchers.protocol import Launcher, LauncherConfig
from agent_loop.processes.host import PROCESS, ProcessConfig
from proxy.errors import ConfigurationError
from proxy.settings.late_section import LateSection
from proxy.settings.outside_part import OutsidePart
from proxy.settings.section import Section

_EXTRAS = "agent_loop.extras"


class OutsideLauncher(OutsidePart, LauncherConfig):
    """A launcher of your own, named by the class of its section."""

    kind = "launcher"

    def build(self, process: ProcessConfig = PROCESS) -> Launcher:
        return self.section(LauncherConfig).build(process)


class AgentConfig(Section):
    """The agent: one of the launchers below.

    Example: AgentConfig(command=CommandConfig(argv=("python", "agent.py"))).build_launcher()
    """

    command: CommandConfig | None = None
    """A program: `command.argv` starts it, and its environment describes the trial."""
    python: Annotated[
        LauncherConfig | None, LateSection("agent_loop.launchers.python:PythonConfig")
    ] = None
    """A Python function, `python.target`, in a process of its own."""
    http: Annotated[LauncherConfig | None, LateSection("agent_loop.launchers.http:HttpConfig")] = (
        None
    )
    """A service that runs agents, at `http.url`."""
    harbor: Annotated[
        LauncherConfig | None, LateSection(f"{_EXTRAS}.harbor.launcher:HarborConfig")
    ] = None
    """An agent of Harbor: `harbor.agent_name` or `harbor.agent_import_path`."""
    kubernetes: Annotated[
        LauncherConfig | None, LateSection(f"{_EXTRAS}.kubernetes.launcher:KubernetesConfig")
    ] = None
    """A pod of a Kubernetes Job for each trial, from `kubernetes.image`."""
    ray: Annotated[LauncherConfig | None, LateSection(f"{_EXTRAS}.ray.launcher:RayConfig")] = None
    """A program in a task of a Ray cluster for each trial: `ray.argv` starts it."""
    verifiers: Annotated[
        LauncherConfig | None, LateSection(f"{_EXTRAS}.environments.verifiers:VerifiersConfig")
    ] = None
    """An environment of the package `verifiers`: `verifiers.env`. It brings tasks and rewards."""
    openenv: Annotated[
        LauncherConfig | None, LateSection(f"{_EXTRAS}.environments.openenv:OpenEnvConfig")
    ] = None
    """An environment of an OpenEnv server, at `openenv.url`. It gives the rewards."""
    launcher: OutsideLauncher | None = None
    """A launcher of your own: `launcher.target` names the class of its section."""
    process: ProcessConfig = PROCESS

    @property
    def agents(self) -> list[str]:
        """The keys that configure an agent: one key, or none if a swarm's clients run agents."""
        return [name for name, value in self if isinstance(value, LauncherConfig)]

    @property
    def agent(self) -> LauncherConfig | None:
        """The section of the agent's launcher; None if no agent is configured."""
        return getattr(self, self.agents[0]) if self.agents else None

    def build_launcher(self) -> Launcher:
        """
        Raises:
            ConfigurationError: no agent is configured, or its launcher refuses its settings.
        """
        if self.agent is None:
            raise ConfigurationError(
                "remote_agent: no agent: set command.argv to the program that starts it, or one of "
                "python, http, harbor, kubernetes, ray, launcher"
            )
        return self.agent.build(self.process)

    @property
    def needs_prompt(self) -> bool:
        """Whether the agent needs a prompt to run a task."""
        return self.agent is not None and self.agent.needs_prompt

    @model_validator(mode="after")
    def _one_launcher(self) -> Self:
        if len(self.agents) > 1:
            raise ValueError(
                f"several agents: remote_agent.{', remote_agent.'.join(self.agents)}; configure one"
            )
        return self

    @model_validator(mode="after")
    def _process_has_an_effect(self) -> Self:
        kept = ProcessConfig.model_fields if self.agent is None else self.agent.process_keys
        for key, value in self.process:
            if key not in kept and value != getattr(PROCESS, key):
                raise ValueError(
                    f"process.{key}: an agent of `{self.agents[0]}` is not a process of this "
                    "machine; remove the key"
                )
        return self
