"""The `remote_agent` section of a run: its agent, its rewards, and the bounds of a trial."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from agent_loop.launchers.registry import AgentConfig
from agent_loop.processes.functions import source_file
from agent_loop.rewards.registry import RewardsConfig
from agent_loop.trial_config import TrialConfig
from proxy import wall
from proxy.errors import ConfigurationError

ANSWER_FIELDS = frozenset({"answer", "answers", "solution", "ground_truth"})
"""Usual dataset names of the fields that only a verifier is meant to see."""


class RemoteAgentConfig(TrialConfig, RewardsConfig, AgentConfig):
    """The agent: one of `command`, `python`, `http`, `launcher`, or (by `agent_name` or
    `agent_import_path`) an agent of Harbor."""

    @property
    def fields_hidden(self) -> frozenset[str]:
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
        shared: list[Path | None] = [] if self.command is None else list(_files(self.command.argv))
        if self.python is not None:
            shared.append(source_file(self.python.target))
        return [path for path in own if path is not None and path not in shared]

    def check_sandbox(self) -> None:
        """
        Raises:
            ConfigurationError: this machine does not support the configured `sandbox`.
        """
        local = self.command is not None or self.python is not None
        if self.sandbox == "off" or not local:
            return
        reason = wall.missing()
        if reason is not None:
            raise ConfigurationError(
                f"remote_agent.sandbox={self.sandbox}: this machine does not allow it ({reason}); "
                "allow namespaces (in a container: --cap-add SYS_ADMIN and a seccomp profile that "
                "permits them), "
                "or set remote_agent.sandbox=off, with which agents can read this run's files"
            )


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
