"""What agents need to reach the proxy: environment variables and flags.

The data are the files of `examples/agents`, by which agents are also trained; the wheel contains
them. Of such a file, `remote_agent.command.env` has the variables, and `run` has what a command
line of the user's own needs in addition:

    run: {flags: [-c, …], env: {…}, files: {NAME: text}}
                                       flags are inserted after the program's name; `files` are
                                       written into `{directory}`
    run: {program: pi}                 its name, where `argv` begins with a shell
    run: {own: {flags: […], env: {…}, files: {NAME: text}}}
                                       for an agent that reaches the proxy in the user's own home,
                                       with the user's settings: all that it gets; null removes a
                                       variable

Placeholders as in training: `{base_url}`, `{api_key}`, `{model}`, `{directory}`; also
`{anthropic_base_url}`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from proxy.client import SessionHandle
from proxy.commands import notes
from proxy.errors import ConfigurationError
from proxy.machine.direct_hosts import with_direct_hosts

_PACKAGES = Path(__file__).resolve().parents[2]
_INSTALLED = _PACKAGES / "agentic_rl_examples"
FOLDER = (_INSTALLED if _INSTALLED.is_dir() else _PACKAGES / "examples") / "agents"

MODEL = "policy"
"""The model name that agents are given. The proxy accepts any name."""
SHELLS = ("sh", "unshare")
"""Programs that start an agent in an example, and are not the agent's own."""
FOREIGN = (
    "ANTHROPIC_AUTH_TOKEN",
    "CLAUDE_CODE_OAUTH_TOKEN",
    "CLAUDE_CODE_USE_BEDROCK",
    "CLAUDE_CODE_USE_VERTEX",
    "GOOGLE_API_KEY",
    "GOOGLE_GENAI_USE_GCA",
    "GOOGLE_GENAI_USE_VERTEXAI",
    "OPENAI_ORGANIZATION",
    "OPENAI_PROJECT_ID",
)
"""Variables that would lead an agent to another provider than the proxy."""


@dataclass(frozen=True, slots=True)
class AgentProgram:
    """Example: AgentProgram("claude-code", "claude", env={"IS_SANDBOX": "1"})"""

    name: str
    program: str
    """The program's file name; empty: a shell starts it."""
    flags: Sequence[str] = ()
    env: Mapping[str, str | None] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    own: AgentProgram | None = None
    """The same agent in the user's own home; None: it cannot be told there where the proxy is."""

    def at_home(self, *, isolated: bool) -> AgentProgram:
        """The agent in the user's own home if it can and shall, else in an empty one."""
        return self if isolated or self.own is None else self.own

    def command(self, argv: Sequence[str], placeholders: Mapping[str, str]) -> list[str]:
        """The user's command with this agent's flags."""
        return [argv[0], *(_filled(flag, placeholders) for flag in self.flags), *argv[1:]]

    def variables(self, placeholders: Mapping[str, str]) -> dict[str, str | None]:
        """By name; None: the variable must not be there."""
        return {
            name: None if value is None else _filled(value, placeholders)
            for name, value in self.env.items()
        }

    def write_files(self, placeholders: Mapping[str, str]) -> None:
        """Writes its files into `{directory}`, readable by this user only."""
        for name, text in self.files.items():
            path = Path(placeholders["directory"], name)
            path.touch(0o600)
            path.write_text(_filled(text, placeholders), encoding="utf-8")


def known_agents() -> dict[str, AgentProgram]:
    """Every agent with a file, by its name: the file's, with `-` for `_`."""
    found = [_read(file) for file in sorted(FOLDER.glob("*.yaml"))]
    return {agent.name: agent for agent in found}


def find_agent(argv: Sequence[str], name: str | None) -> AgentProgram:
    """The agent of this name, or else the one whose program is called; an agent without variables
    of its own if none is known.

    Raises:
        ConfigurationError: the name is unknown.
    """
    known = known_agents()
    if name is not None:
        if name not in known:
            raise ConfigurationError(f"--agent {name}: unknown; use one of {', '.join(known)}")
        return known[name]
    program = Path(argv[0]).name
    matching = (agent for agent in known.values() if agent.program == program)
    return next(matching, AgentProgram(program, program))


def session_variables(session: SessionHandle) -> dict[str, str]:
    """What every agent gets, in the names that the SDKs of OpenAI, Anthropic and Google read."""
    return {
        "OPENAI_BASE_URL": session.base_url,
        "OPENAI_API_BASE": session.base_url,
        "OPENAI_API_KEY": session.api_key,
        "OPENAI_MODEL": MODEL,
        "ANTHROPIC_BASE_URL": session.anthropic_base_url,
        "ANTHROPIC_API_KEY": session.api_key,
        "ANTHROPIC_MODEL": MODEL,
        "GOOGLE_GEMINI_BASE_URL": session.anthropic_base_url,
        "GEMINI_API_KEY": session.api_key,
        "AGENT_MODEL": MODEL,
    }


def agent_environment(
    agent: AgentProgram, session: SessionHandle, directory: Path
) -> dict[str, str]:
    """This process's environment without secrets of the proxy and without `FOREIGN`, and the
    variables by which the agent reaches the session."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("AGENTIC_") and name not in FOREIGN
    }
    own = agent.variables(placeholders(session, directory))
    inherited["PWD"] = os.getcwd()  # some agents read it instead of calling getcwd
    noted = {notes.VARIABLE: str(directory / notes.FILE), notes.COMMAND: notes.own_command()}
    given = {**inherited, **session_variables(session), **noted, **own}
    kept = {name: value for name, value in given.items() if value is not None}
    return with_direct_hosts(kept, session.base_url)


def placeholders(session: SessionHandle, directory: Path) -> dict[str, str]:
    return {
        "base_url": session.base_url,
        "anthropic_base_url": session.anthropic_base_url,
        "api_key": session.api_key,
        "model": MODEL,
        "directory": str(directory),
    }


def _read(file: Path) -> AgentProgram:
    loaded: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    command, run = loaded["remote_agent"]["command"], loaded.get("run", {})
    env = {**command.get("env", {}), **run.get("env", {})}
    name, first = file.stem.replace("_", "-"), Path(command["argv"][0]).name
    program = run.get("program", "" if first in SHELLS else first)
    own = AgentProgram(name, program, **run["own"]) if "own" in run else None
    return AgentProgram(name, program, run.get("flags", ()), env, run.get("files", {}), own)


def _filled(text: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        text = text.replace("{" + name + "}", value)
    return text
