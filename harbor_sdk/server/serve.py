"""Serves Harbor trials until a signal ends it, with the settings of `harbor-server`'s flags."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from aiohttp import web
from pydantic import ValidationError

from harbor_sdk.server.app import build_app
from harbor_sdk.server.config import ServerConfig
from harbor_sdk.server.guard import TOKEN_FILE, hide_memory, kept_token, request_log

SHUTDOWN_TIMEOUT_S = 2.0
"""For requests in flight. Long-polls and event streams are closed, and their clients repeat
them."""

_JSON_FLAGS = ("environment_kwargs", "environment_concurrency")


class NoLockError(Exception):
    """The file system of the state folder gives no locks."""


def serve(given: Mapping[str, Any]) -> int:
    """Serves with these flags (name → value); variables of the environment give the others. Returns
    the exit code."""
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
        config = ServerConfig.model_validate(_settings(given))
    except (ValidationError, ValueError) as error:
        print(f"harbor-server: {error}", file=sys.stderr)
        return 2
    try:
        lock = locked(config.state_dir)
    except NoLockError as error:
        print(f"harbor-server: {error}", file=sys.stderr)
        return 2
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

    Raises NoLockError: nobody can hold it, as on NFS without a lock service.
    """
    state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    file = (state_dir / "lock").open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except OSError as error:
        file.close()
        raise NoLockError(
            f"{state_dir} gives no lock ({error.strerror}), without which two servers could run "
            "one trial twice; pass a --state-dir on a local disk"
        ) from error
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
        print(f"harbor-server on {_url(host, port)}", flush=True)
        # LiteLLM logs to standard output, and would wait for a reader that wanted the address only.
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        if "HARBOR_SERVER_TOKEN" not in os.environ:
            path = config.state_dir / TOKEN_FILE
            print(f"clients: export HARBOR_SERVER_TOKEN=$(cat {path})", file=sys.stderr)
        await ended.wait()
    except OSError as error:
        print(f"harbor-server: {_url(config.host, config.port)}: {error.strerror}", file=sys.stderr)
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


def _settings(given: Mapping[str, Any]) -> dict[str, object]:
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


def _parsed(name: str, value: str) -> object:
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is not JSON ({error}): {value[:80]!r}") from None


def _url(host: str, port: int) -> str:
    """An IPv6 address is in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
