"""`agentic-proxy`: `serve` runs the proxy.

Every flag is also a key of the YAML file (`--config`) and of the environment (`AGENTIC_PROXY_…`).
A wrong configuration, a port in use or a folder that is no checkpoint ends in one line and code 2.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import signal
import sys
from pathlib import Path
from typing import Any

import uvloop
from aiohttp import web

from proxy.app import build_app
from proxy.config import ProxyConfig, load_config
from proxy.errors import ConfigurationError

GC_THRESHOLDS = (50_000, 20, 100)
"""Calls make little that only the collector can free, and a full collection walks every session's
tree: so rarely, and never what was there at the start."""


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        result: int = arguments.run(arguments)
    except ConfigurationError as error:
        print(f"agentic-proxy: {error.message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return result


def serve(arguments: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    config = load_config(arguments.config, **_overrides(arguments))
    uvloop.run(_serve(config))
    return 0


async def _serve(config: ProxyConfig) -> None:
    runner = web.AppRunner(build_app(config), handler_cancellation=True, access_log=None)
    await runner.setup()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        site = web.TCPSite(runner, config.host, config.port, reuse_port=config.workers > 1)
        try:
            await site.start()
        except OSError as error:
            raise ConfigurationError(
                f"port: {config.host}:{config.port} cannot be listened on: {error.strerror}; "
                "free it or give another --port"
            ) from error
        _announce(config, runner)
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        await stop.wait()
    finally:
        await runner.cleanup()


def _announce(config: ProxyConfig, runner: web.AppRunner) -> None:
    host, port = runner.addresses[0][:2]
    url = (config.public_url or f"http://{host}:{port}").rstrip("/")
    session = f"{url}/my-session" if config.sessions.auto_create else url
    key = "any" if config.sessions.auto_create else "<a session's key>"
    print(f"recording proxy on {url}, store {config.store}")
    print(f"export OPENAI_BASE_URL={session}/v1 OPENAI_API_KEY={key}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="agentic-proxy", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add = commands.add_parser("serve", help="run the recording proxy")
    add.set_defaults(run=serve)
    add.add_argument("--config", type=Path, help="YAML file with any of the keys")
    add.add_argument("--engine", action="append", metavar="URL", help="a vLLM server; repeatable")
    add.add_argument("--model", type=Path, help="folder of the checkpoint that the engines serve")
    add.add_argument("--store", help="sqlite:///FILE or postgresql://…")
    add.add_argument("--host")
    add.add_argument("--port", type=int)
    add.add_argument("--auto-create", action="store_true", default=None)
    return parser


def _overrides(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(arguments, name) for name in ("model", "store", "host", "port")}
    overrides = {name: value for name, value in given.items() if value is not None}
    if arguments.engine:
        overrides["engines"] = [{"url": url} for url in arguments.engine]
    if arguments.auto_create:
        overrides["sessions"] = {"auto_create": True}
    return overrides
