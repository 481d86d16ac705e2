"""`agentic-proxy`: `serve` runs the proxy, `sessions` and `replay` read what it recorded.

Every flag is also a key of the YAML file (`--config`) and of the environment (`AGENTIC_PROXY_…`).
A wrong configuration, a port in use or a folder that is no checkpoint ends in one line and code 2.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

import uvloop

from proxy import logs
from proxy.commands.sessions import add_commands
from proxy.config import ProxyConfig, load_config
from proxy.errors import ConfigurationError, EngineError
from proxy.processes import serving


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        result: int = arguments.run(arguments)
    except (ConfigurationError, EngineError) as error:
        print(f"agentic-proxy: {error.message}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    return result


def serve(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.config, **_overrides(arguments))
    logs.set_up(config.log)
    uvloop.run(serving.serve(config, _announce))
    return 0


def _announce(config: ProxyConfig, url: str) -> None:
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
    add.add_argument(
        "--engine",
        action="append",
        metavar="URL",
        help="a running vLLM; repeatable; else one is started",
    )
    add.add_argument("--model", type=Path, help="folder of the checkpoint that the engines serve")
    add.add_argument("--store", help="sqlite:///FILE or postgresql://…")
    add.add_argument("--host")
    add.add_argument("--port", type=int)
    add.add_argument("--workers", type=int, metavar="N", help="processes on the one port")
    add.add_argument("--log", choices=["text", "json"], help="json: with a line per call")
    add.add_argument("--auto-create", action="store_true", default=None)
    add_commands(commands)
    return parser


_PLAIN = ("model", "store", "host", "port", "workers", "log")
"""Flags that are keys of the same name."""


def _overrides(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(arguments, name) for name in _PLAIN}
    overrides = {name: value for name, value in given.items() if value is not None}
    if arguments.engine:
        overrides["engines"] = [{"url": url} for url in arguments.engine]
    if arguments.auto_create:
        overrides["sessions"] = {"auto_create": True}
    return overrides
