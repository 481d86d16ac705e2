"""The swarm server as a process: state on disk, the trainer as its child.

Invariant: off loopback there is a token, or there is no server.
"""

from __future__ import annotations

import asyncio
import fcntl
import ipaddress
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from agent_loop.swarm.batching import SwarmSettings
from agent_loop.swarm.server import SwarmServer
from agent_loop.swarm.swarm import Swarm
from agent_loop.swarm.table import EpisodeTable
from agent_loop.swarm.trainer_process import TrainerProcess
from proxy.errors import ConfigurationError

TOKEN_VARIABLE = "AGENTIC_SWARM_TOKEN"
URL_VARIABLE = "AGENTIC_SWARM_URL"
TRAINER_KEY_VARIABLE = "AGENTIC_SWARM_TRAINER_KEY"
SHUTDOWN_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Example: ServeOptions("127.0.0.1:8100", Path("runs/swarm"), ["agentic-train", …])"""

    address: str
    """`host:port`; port 0: a free one, printed."""
    state_dir: Path
    begin: Sequence[str]
    """Starts the trainer; `{config}` becomes the path of the clients' YAML."""
    resume: Sequence[str] = ()
    """Goes on with its run, `{run_dir}`; empty: it begins again."""
    config: Path | None = None
    """The YAML to begin with; clients may put another."""


async def serve(options: ServeOptions, listening: Callable[[str], None]) -> None:
    """Until SIGTERM or SIGINT; then the trainer has ended. `listening` is told the URL.

    Raises:
        ConfigurationError: the address cannot be used, or needs a token.
    """
    host, port = _address(options.address)
    token = os.environ.get(TOKEN_VARIABLE) or None
    if token is None and not _is_loopback(host):
        raise ConfigurationError(
            f"--swarm-server {options.address}: other machines reach it; set {TOKEN_VARIABLE}, or "
            "bind 127.0.0.1"
        )
    state = options.state_dir
    (state / "records").mkdir(parents=True, exist_ok=True)
    lock = (state / "lock").open("ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until this process ends
    except BlockingIOError:
        lock.close()
        raise ConfigurationError(
            f"--state-dir {state}: another swarm server has it; stop it, or give another folder"
        ) from None
    config = state / "trainer.yaml"
    if options.config is not None:
        config.write_text(options.config.read_text())
    swarm = Swarm(SwarmSettings(), EpisodeTable(state / "swarm.sqlite"), state / "records")
    begin = [part.replace("{config}", str(config)) for part in options.begin]
    engine = TrainerProcess(swarm, begin, options.resume, state / "trainer.log")
    server = SwarmServer(swarm, engine, token, config)
    runner = web.AppRunner(server.build_app(), shutdown_timeout=SHUTDOWN_TIMEOUT_S)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        port = runner.addresses[0][1]
        engine.env |= {
            URL_VARIABLE: f"http://127.0.0.1:{port}",
            TRAINER_KEY_VARIABLE: server.trainer_key,
        }
        listening(f"http://{host}:{port}")
        await _until_told_to_end()
    except OSError as error:
        raise ConfigurationError(f"--swarm-server {options.address}: {error.strerror}") from error
    finally:
        await runner.cleanup()
        lock.close()


async def _until_told_to_end() -> None:
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    await ended.wait()


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigurationError(f"--swarm-server {text!r}: give host:port, like 127.0.0.1:8100")
    return host.strip("[]"), int(port)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
