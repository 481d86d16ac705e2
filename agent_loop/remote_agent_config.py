"""The `remote_agent` section of a run: its agent, its rewards, and the bounds of a trial."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from agent_loop.extras.environments.verifiers import FIELD
from agent_loop.launchers.registry import AgentConfig
from agent_loop.processes.functions import source_file
from agent_loop.rewards.registry import RewardsConfig
from agent_loop.trial.config import TrialConfig
from harbor_sdk.sandbox import SandboxError, require_privilege
from proxy import wall
from proxy.errors import ConfigurationError
from proxy.machine import landlock

ANSWER_FIELDS = frozenset({"answer", "answers", "solution", "ground_truth"})
"""Usual dataset names of the fields that only a verifier is meant to see."""


class RemoteAgentConfig(TrialConfig, RewardsConfig, AgentConfig):
    """The agent: one of `command`, `python`, `http`, `kubernetes`, `ray`, `launcher`, or (by
    `agent_name` or `agent_import_path`) an agent of Harbor."""

    @property
    def fields_hidden(self) -> frozenset[str]:
        if self.hidden_fields is None and self.verifiers is not None:
            return frozenset({FIELD})
        graded = self.verifier or self.grader or self.judge or self.reward
        if self.hidden_fields is None and graded:
            return ANSWER_FIELDS
        return super().fields_hidden

    @property
    def private_files(self) -> list[Path]:
        """The verifier's and the grader's own files, unless the agent is one of them."""
        own: list[Path | None] = [] if self.verifier is None else list(_files(self.verifier.argv))
        if self.grader is not None:
            own.append(source_file(self.grader.target))
        shared = self._agent_files
        return [path for path in own if path is not None and path not in shared]

    def owns(self, path: Path) -> bool:
        """Whether the file is one of the agent's own."""
        return path in self._agent_files

    @property
    def shown_files(self) -> list[Path]:
        """What a local agent can read with `sandbox: strict`: its scripts or its module, and the
        Python of this run."""
        python = {Path(sys.prefix), Path(sys.base_prefix)}
        files = self._agent_files
        if self.verifiers is not None:
            python |= {self.verifiers.python.absolute().parents[1], *self.verifiers.path}
        # A module may import its neighbours.
        return [*python, *([file.parent for file in files] if self.python is not None else files)]

    @property
    def _agent_files(self) -> list[Path]:
        """The agent's own scripts, or the file of its module."""
        if self.command is not None:
            return list(_files(self.command.argv))
        file = None if self.python is None else source_file(self.python.target)
        return [] if file is None else [file]

    @property
    def sandbox_warning(self) -> str | None:
        """One line for the start of a run on what its agents can reach; None: nothing of the
        run."""
        if self.ray is not None:
            return (
                "warning: remote_agent.ray: agents have no wall on their nodes; they can read what "
                "Ray's user can read, and can connect to Ray"
            )
        if not self._is_local:
            return None
        if self.sandbox == "off":
            return (
                "warning: remote_agent.sandbox=off: agents can read this run's files, its keys and "
                "the verifier's answers"
            )
        reason = landlock.missing()
        return reason and (
            f"warning: {reason}: agents can connect to the ports of this run's processes (Ray, "
            "torch, engines); use Linux 6.7 or later"
        )

    def check_sandbox(self) -> None:
        """
        Raises:
            ConfigurationError: this machine does not support the configured `sandbox`.
        """
        if self._is_local and sys.platform != "linux":
            raise ConfigurationError(
                f"remote_agent: agents as processes of this machine need Linux, and this is "
                f"{sys.platform}: there is no sandbox here (remote_agent.sandbox), and nothing "
                "ends what an agent leaves running; use the launcher harbor, http or kubernetes, "
                "or a swarm, or start this in a Linux container or virtual machine"
            )
        if self.sandbox == "off" or not self._is_local:
            return
        if self.sandbox == "strict":
            try:
                require_privilege()
            except SandboxError as error:
                raise ConfigurationError(
                    f"remote_agent.sandbox=strict: {error}; or set remote_agent.sandbox=light"
                ) from error
        reason = wall.missing()
        if reason is not None:
            raise ConfigurationError(
                f"remote_agent.sandbox={self.sandbox}: this machine does not allow it ({reason}); "
                "allow namespaces (in a container: --cap-add SYS_ADMIN and a seccomp profile that "
                "permits them), "
                "or set remote_agent.sandbox=off, with which agents can read this run's files"
            )

    @property
    def _is_local(self) -> bool:
        """Whether agents are processes of this machine."""
        local = (self.command, self.python, self.verifiers, self.openenv)
        return any(section is not None for section in local)


def _files(argv: Sequence[str]) -> Iterator[Path]:
    """The scripts among a command's arguments. The program itself counts only if it is a script,
    because agents need the interpreters, too."""
    for number, word in enumerate(argv):
        path = word.replace("{root}", str(Path.cwd()))
        if os.path.isfile(path) and (number > 0 or _is_script(path)):
            yield Path(path).absolute()


def _is_script(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(2) == b"#!"
