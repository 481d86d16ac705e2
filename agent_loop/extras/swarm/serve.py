"""The swarm server as a process: state on disk, the trainer as its child.

Invariant: a state folder has one server at a time, and every server has a token.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from agent_loop.extras.swarm.server import SwarmServer
from agent_loop.extras.swarm.swarm import Swarm
from agent_loop.extras.swarm.table import EpisodeTable
from agent_loop.extras.swarm.token import server_token
from agent_loop.extras.swarm.trainer_process import TrainerProcess
from proxy.errors import ConfigurationError
from proxy.http.server import app_runner
from proxy.http.web_guard import EVERYWHERE, Hosts
from proxy.machine.open_files import raise_limit
from proxy.machine.port import BACKLOG, MAX_PORT, http_url

HOSTS_VARIABLE = "AGENTIC_SWARM_ALLOWED_HOSTS"
"""Variable with additional host names of the server that clients use, separated by commas."""
SHUTDOWN_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Example: ServeOptions("127.0.0.1:8100", Path("runs/swarm"), ["agentic-train", …])"""

    address: str
    """`host:port`; port 0: a free port, which is printed."""
    state_dir: Path
    begin: Sequence[str]
    """The command that starts the trainer; `{config}` becomes the path of the clients' YAML."""
    resume: Sequence[str] = ()
    """The command that resumes the run in `{run_dir}`; empty: every start begins a new run."""
    config: Path | None = None
    """The YAML to begin with; clients may replace it."""
    default_config: str = ""
    """The YAML of a new state folder without `config`; empty: clients must send one."""


async def serve(options: ServeOptions, listening: Callable[[str], None]) -> None:
    """Serves until SIGTERM or SIGINT and ends the trainer. Calls `listening` with the URL.

    Raises:
        ConfigurationError: the address, the state folder or the configuration cannot be used.
    """
    host, port = _address(options.address)
    state = options.state_dir
    with _locked(state):
        config = state / "trainer.yaml"
        if options.config is not None:
            config.write_bytes(_content(options.config))
        elif options.default_config and not config.exists():
            config.write_text(options.default_config, encoding="utf-8")
        table = EpisodeTable(state)
        swarm = Swarm(table)
        begin = [part.replace("{config}", str(config)) for part in options.begin]
        engine = TrainerProcess(swarm, begin, options.resume, state / "trainer.log")
        hosts = Hosts(host, filter(None, os.environ.get(HOSTS_VARIABLE, "").split(",")))
        server = SwarmServer(swarm, engine, table, server_token(state), config, hosts)
        raise_limit()
        runner = app_runner(server.build_app(), shutdown_timeout=SHUTDOWN_TIMEOUT_S)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port, backlog=BACKLOG).start()
            port = runner.addresses[0][1]
            engine.url = http_url("127.0.0.1" if host in EVERYWHERE else host, port)
            engine.key = server.trainer_key
            listening(http_url(host, port))
            await _until_stopped()
        except OSError as error:
            raise ConfigurationError(
                f"--swarm-server {options.address}: cannot listen there: {error.strerror}"
            ) from error
        finally:
            await runner.cleanup()


@contextmanager
def _locked(state_dir: Path) -> Iterator[None]:
    """Holds the folder until the block or this process ends."""
    try:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (state_dir / "lock").open("ab")
    except OSError as error:
        raise ConfigurationError(
            f"--state-dir {state_dir}: cannot be used ({error.strerror}); give a folder that is "
            "writable"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(
                f"--state-dir {state_dir}: another swarm server uses it; stop that server, or give "
                "another folder"
            ) from None
        except OSError as error:  # NFS without its lock service
            raise ConfigurationError(
                f"--state-dir {state_dir}: this file system gives no lock ({error.strerror}); "
                "mount it with locks (for NFS: version 4), or give a folder on another disk"
            ) from error
        yield


def _content(config: Path) -> bytes:
    try:
        return config.read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"--config {config}: cannot be read ({error.strerror}); give a YAML file"
        ) from error


async def _until_stopped() -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await stopped.wait()


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > MAX_PORT:
        raise ConfigurationError(
            f"--swarm-server {text!r}: give host:port, like 127.0.0.1:8100, with a port of at most "
            f"{MAX_PORT}"
        )
    return host.strip("[]"), int(port)
