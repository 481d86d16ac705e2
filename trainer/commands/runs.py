"""The commands of `agentic-train`.

Invariant: every problem is reported in one line on standard error, with an exit code other than 0
(2: the configuration; 1: the run; 128 + N: signal N), and no process is left running.
"""

from __future__ import annotations

import asyncio
import errno
import sqlite3
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from agent_loop.errors import AgentLoopError
from proxy.client import ProxyClientError
from proxy.errors import ConfigurationError, ProxyError
from proxy.machine import logs
from proxy.machine.command_line import importing
from proxy.machine.logs import LogLevel
from proxy.machine.secrecy import hide_memory
from proxy.settings.late_section import load_extra
from trainer.errors import ConfigError, TrainerError
from trainer.run.folder import RunFolder
from trainer.settings.values import Sources

EXPECTED = (TrainerError, ProxyError, ProxyClientError, AgentLoopError)
"""Errors whose message is for the user; so is that of a full disk (`is_full`), and any other error
is a bug and is shown with a traceback."""

DEFAULT_SWARM_CONFIG = """\
# What a swarm server trains by without --config: the defaults of docs/configuration.md. Only
# model.path has none: set it here, or as model.path=FOLDER behind --swarm-server HOST:PORT.
swarm: {}
"""


@dataclass(frozen=True, slots=True)
class Command:
    """A command line. Example: Command(words, [path], sources_of([path], words, os.environ))"""

    words: Sequence[str]
    configs: Sequence[Path]
    sources: Sources
    """What `words` and `configs` say; not read yet, or read once."""
    check: bool = False
    changed: bool = False
    """Whether a check prints only what is not a default."""
    swarm_server: str | None = None
    state_dir: Path = Path("runs/swarm")
    log_level: LogLevel | None = None


def run(command: Command) -> int:
    """Runs the command; returns its exit code."""

    def chosen() -> int:
        if command.swarm_server:
            return _serve_swarm(command, command.swarm_server)
        return _run(command)

    return reporting("agentic-train", chosen)


def reporting(name: str, command: Callable[[], int]) -> int:
    """Runs the command; prints expected errors as one line each. Returns the exit code."""
    try:
        return command()
    except (*EXPECTED, OSError, sqlite3.Error, ExceptionGroup) as error:
        expected = _first_expected(error)
        if expected is None:
            raise
        if is_full(expected):
            expected = TrainerError(_where_full(expected))
        problems = expected.problems if isinstance(expected, ConfigError) else (str(expected),)
        for problem in problems:
            print(f"{name}: {' '.join(problem.split())}", file=sys.stderr)
        if isinstance(expected, TrainerError):
            return expected.exit_code
        return 2 if isinstance(expected, ConfigurationError) else 1


def _run(command: Command) -> int:
    words, sources = command.words, command.sources
    name, rest = (words[0], words[1:]) if words and "=" not in words[0] else ("train", words)
    if name == "report":
        return _report(rest)
    if name not in ("train", "resume"):
        raise ConfigError(
            f"{name!r}: not a command, nor key=value; `agentic-train --help` lists the commands,"
            " and `agentic-proxy sessions list --store RUN` a run's sessions"
        )
    with importing():
        from trainer.start import begin, check_only, resume

    if name == "resume":
        if not rest or ("=" in rest[0] and not Path(rest[0]).is_dir()):  # a sweep's are seed=0
            raise ConfigError("resume: give the run's folder, like runs/quickstart")
        return resume(Path(rest[0]), sources)
    if not sources.paths:
        raise ConfigError("--config: missing; give a YAML file, like agentic_trainer.yaml")
    if command.check:
        print(check_only(sources, changed=command.changed), end="")
        return 0
    return begin(sources)


def _serve_swarm(command: Command, address: str) -> int:
    """Serves a swarm. The trainer is a child process, which the clients start."""
    hide_memory()
    logs.set_up("text", command.log_level or "info")
    configs, state_dir = command.configs, command.state_dir
    if len(configs) > 1:
        raise ConfigError(f"--config: a swarm server takes one file, not {len(configs)}")
    if others := [word for word in command.words if "=" not in word]:
        raise ConfigError(f"{others[0]!r}: expected key=value after --swarm-server {address}")
    program = [sys.executable, "-m", "trainer.cli"]
    level = [f"logging.log_level={command.log_level}"] if command.log_level else []
    words = ["swarm={}", *command.words, *level]
    begin = [*program, "--config", "{config}", *words]
    resume = [*program, "resume", "{run_dir}", *words]
    options = load_extra("agent_loop.extras.swarm.serve:ServeOptions")(
        address,
        state_dir,
        begin,
        resume,
        config=configs[0] if configs else None,
        default_config=DEFAULT_SWARM_CONFIG,
    )

    place = load_extra("agent_loop.extras.swarm.token:token_place")

    def listening(url: str) -> None:
        print(f"swarm server on {url}\nits token is in {place(state_dir)}", flush=True)

    asyncio.run(load_extra("agent_loop.extras.swarm.serve:serve")(options, listening))
    return 0


def _report(words: Sequence[str]) -> int:
    if len(words) != 1:
        raise ConfigError("report: give one run's folder, like runs/quickstart")
    report = load_extra("trainer.extras.report:write_report")(RunFolder.open(Path(words[0])))
    print(report.page)
    return 0


def _first_expected(error: BaseException) -> BaseException | None:
    """The first error of a group, if all errors in the group are expected; else None."""
    if not isinstance(error, BaseExceptionGroup):
        return error if isinstance(error, EXPECTED) or is_full(error) else None
    found = [_first_expected(each) for each in error.exceptions]
    return None if None in found else found[0]


def is_full(error: BaseException) -> bool:
    """Whether a file could not be written because its disk, or the user's part of it, is full."""
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorname", "") == "SQLITE_FULL"
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _where_full(error: BaseException) -> str:
    named = getattr(error, "filename", None)
    where = f"the disk of {named}" if named else "a disk that the run writes to"
    return (
        f"{where} is full (df -h shows how full each is); free space on it, or choose a "
        "trainer.run_dir on another one, and start the same command again: it continues an "
        "interrupted run"
    )
