"""`harbor-server`. Every flag is also a variable HARBOR_SERVER_<FLAG>; the command line wins.

The token comes from HARBOR_SERVER_TOKEN, else from the file `token` in the state folder, which the
server creates at its first start.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import logging
import os
import signal
import sys
from importlib import metadata
from pathlib import Path
from typing import IO

from aiohttp import web
from pydantic import ValidationError

from harbor_sdk.server.app import build_app
from harbor_sdk.server.config import DEFAULT_ENVIRONMENT, ServerConfig
from harbor_sdk.server.guard import TOKEN_FILE, hide_memory, kept_token, request_log

SHUTDOWN_TIMEOUT_S = 2.0
"""For requests in flight. Long-polls and event streams are closed, and their clients repeat
them."""

_JSON_FLAGS = ("environment_kwargs", "environment_concurrency")


def main(arguments: list[str] | None = None) -> int:
    try:
        from harbor_sdk.trial import run_trial
    except ImportError as error:
        print(
            f"harbor-server needs Python 3.12 and the harbor package ({error}); run "
            "`pip install harbor` with Python 3.12, or `make harbor` in the repository",
            file=sys.stderr,
        )
        return 2
    hide_memory()
    try:
        config = ServerConfig.model_validate(_settings(arguments))
    except (ValidationError, ValueError) as error:
        print(f"harbor-server: {error}", file=sys.stderr)
        return 2
    lock = locked(config.state_dir)
    if lock is None:
        print(
            f"harbor-server: another harbor-server uses {config.state_dir}: stop it, or pass "
            "another --state-dir",
            file=sys.stderr,
        )
        return 2
    _log_to_stderr()
    # Otherwise Harbor sends usage statistics of every trial.
    os.environ.setdefault("HARBOR_TELEMETRY", "0")
    with lock:
        return asyncio.run(_serve(config, build_app(config, run_trial)))


def locked(state_dir: Path) -> IO[bytes] | None:
    """The lock of a state folder, held while the file is open; None if another process holds it.

    A second server on the folder would start queued runs again and report running ones as lost.
    """
    state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    file = (state_dir / "lock").open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


async def _serve(config: ServerConfig, app: web.Application) -> int:
    runner = web.AppRunner(
        app, shutdown_timeout=SHUTDOWN_TIMEOUT_S, access_log=None, logger=request_log()
    )
    await runner.setup()
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    try:
        await web.TCPSite(runner, config.host, config.port).start()
        host, port = runner.addresses[0][:2]
        print(f"harbor-server on http://{host}:{port}", flush=True)
        if "HARBOR_SERVER_TOKEN" not in os.environ:
            path = config.state_dir / TOKEN_FILE
            print(f"clients: export HARBOR_SERVER_TOKEN=$(cat {path})", file=sys.stderr)
        await ended.wait()
    except OSError as error:
        print(f"harbor-server: {config.host}:{config.port}: {error.strerror}", file=sys.stderr)
        return 2
    finally:
        await runner.cleanup()
    return 0


def _log_to_stderr() -> None:
    """Only the handler filters by level: Harbor's trials log at DEBUG into their own files."""
    handler = logging.StreamHandler()
    handler.setLevel(logging.INFO)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", handlers=[handler]
    )


def _settings(arguments: list[str] | None) -> dict[str, object]:
    parser = argparse.ArgumentParser(
        prog="harbor-server", description="Runs Harbor trials for AgentRunClient."
    )
    parser.add_argument("--version", action=_Version)
    parser.add_argument("--host", help="default 127.0.0.1")
    parser.add_argument("--port", type=int, help="default 8090")
    parser.add_argument("--state-dir", help="runs, tasks and trials; default ./harbor-server")
    parser.add_argument("--tasks", action="append", help="folder of tasks; may be repeated")
    parser.add_argument("--environment", help=f"default {DEFAULT_ENVIRONMENT}")
    parser.add_argument("--environment-kwargs", help="JSON object: arguments of that environment")
    parser.add_argument("--concurrency", type=int, help="runs at once per environment; default 8")
    parser.add_argument("--environment-concurrency", help='JSON: {"docker": 4}')
    parser.add_argument("--max-queued", type=int, help="default 1000")
    parser.add_argument("--max-archive-mb", type=int, help="default 100")
    parser.add_argument("--max-task-mb", type=int, help="default 1000")
    parser.add_argument("--keep-s", type=float, help="lifetime of finished runs")
    given = {k: v for k, v in vars(parser.parse_args(arguments)).items() if v is not None}
    settings: dict[str, object] = {}
    for name in ("token", *ServerConfig.model_fields):
        value = given.get(name, os.environ.get(f"HARBOR_SERVER_{name.upper()}"))
        if value is not None:
            settings[name] = _parsed(name, value) if name in _JSON_FLAGS else value
    if not settings.get("token"):
        folder = settings.get("state_dir", ServerConfig.model_fields["state_dir"].default)
        settings["token"] = kept_token(Path(str(folder)))
    roots = given.get("tasks") or os.environ.get("HARBOR_SERVER_TASKS", "").split(os.pathsep)
    settings["task_roots"] = [Path(root) for root in roots if root]
    return settings


class _Version(argparse.Action):
    def __init__(self, option_strings: list[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the version")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        parser.exit(message=f"harbor-server {metadata.version('agentic-rl')}\n")


def _parsed(name: str, value: str) -> object:
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is not JSON ({error}): {value[:80]!r}") from None
