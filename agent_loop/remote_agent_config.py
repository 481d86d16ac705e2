"""The `remote_agent` section of a run: its agent, its rewards, and the bounds of a trial."""

from __future__ import annotations

import sys
from pathlib import Path

from agent_loop.launchers.command import misplaced_script, scripts
from agent_loop.launchers.registry import AgentConfig
from agent_loop.rewards.registry import RewardsConfig
from agent_loop.trial.config import TrialConfig
from harbor_sdk.sandbox import SandboxError, require_privilege
from proxy import wall
from proxy.errors import ConfigurationError

ANSWER_FIELDS = frozenset({"answer", "answers", "solution", "ground_truth"})
"""Usual dataset names of the fields that only a verifier is meant to see."""


_IS_LINUX = sys.platform == "linux"


class RemoteAgentConfig(TrialConfig, RewardsConfig, AgentConfig):
    """The agent (one of `command`, `python`, `http`, `harbor`, `kubernetes`, `ray`, `verifiers`,
    `openenv` and `launcher`), its rewards, and the bounds of a trial."""

    @property
    def fields_hidden(self) -> frozenset[str]:
        if self.hidden_fields is None and self.agent is not None and self.agent.hidden_fields:
            return self.agent.hidden_fields
        graded = self.verifier or self.grader or self.judge or self.reward
        if self.hidden_fields is None and graded:
            return ANSWER_FIELDS
        return super().fields_hidden

    @property
    def private_files(self) -> list[Path]:
        """The verifier's and the grader's own files, unless the agent is one of them."""
        own = [] if self.verifier is None else list(scripts(self.verifier.argv))
        if self.grader is not None:
            own += self.grader.files
        return [path for path in own if path not in self._own_files]

    def owns(self, path: Path) -> bool:
        """Whether the file is one of the agent's own."""
        return path in self._own_files

    @property
    def shown_files(self) -> list[Path]:
        """What a local agent can read: its scripts or its module, and the Python of this run."""
        return [
            Path(sys.prefix),
            Path(sys.base_prefix),
            *(self.agent.folders if self.agent else ()),
        ]

    @property
    def _own_files(self) -> tuple[Path, ...]:
        """The agent's own scripts, or the file of its module."""
        return self.agent.files if self.agent is not None else ()

    @property
    def sandbox_warning(self) -> str | None:
        """One line for the start of a run on what its agents can reach; None: nothing of the
        run."""
        if self.agent is not None and (said := self.agent.warning(self.sandbox_kind)) is not None:
            return said
        if not self._is_local:
            return None
        if self.sandbox_kind == "off":
            return (
                "warning: remote_agent.sandbox=off: agents can read and change this run's files, "
                "its keys and the verifier, and what they leave runs in the verifier"
            )
        parts = ", ".join(f"{name} ({why})" for name, why in wall.lacking().items())
        return f"warning: remote_agent.sandbox={self.sandbox}: not held: {parts}" if parts else None

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
        judged = self.verifier is not None or self.grader is not None
        if self.sandbox_kind == "off" or not (self._is_local or (judged and _IS_LINUX)):
            return
        if self.sandbox_kind == "strict" and self._is_local:
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
                "or set remote_agent.sandbox=off, with which no line of docs/wall.md holds: agents "
                "can read and change this run's files"
            )
        if (parts := wall.lacking(self.accepted)) and self._is_local:
            said = "; ".join(f"{wall.PARTS[name]} ({why})" for name, why in parts.items())
            words = f"{self.sandbox_kind} without {', '.join(sorted({*parts, *self.accepted}))}"
            raise ConfigurationError(
                f"remote_agent.sandbox={self.sandbox}: this machine does not hold all of "
                f"docs/wall.md: {said}; use a newer kernel, or accept it: "
                f'remote_agent.sandbox="{words}"'
            )

    def check_scripts(self, key: str) -> None:
        """`key`: where the section is.

        Raises:
            ConfigurationError: a script of the agent or the verifier is named by a path relative to
                this process's folder, or does not exist. Both start in the trial's working folder.
        """
        template = self.command.template if self.command is not None else None
        for name, argv, makes in (
            ("command", self.command.argv if self.command else (), False),
            ("verifier", self.verifier.argv if self.verifier else (), True),
        ):
            if (word := misplaced_script(argv, template, made_in_trial=makes)) is None:
                continue
            there = f"{{root}}/{word}" if Path(word).is_file() else "{root}/PATH"
            found = "" if Path(word).is_file() else ", and there is no such file there"
            raise ConfigurationError(
                f"{key}.{name}.argv: {word!r} is looked for in the trial's own working folder"
                f"{found}; write {there}, where {{root}} is the folder in which agentic-train "
                "starts, or an absolute path"
            )

    @property
    def _is_local(self) -> bool:
        """Whether agents are processes of this machine."""
        return self.agent is not None and self.agent.is_local
