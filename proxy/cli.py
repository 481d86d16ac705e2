"""`agentic-proxy`: `serve` runs the recording proxy; `sessions` and `replay` read its record.

Each flag is also a key in the YAML file (--config) and an environment variable (AGENTIC_PROXY_…).
If a setting is invalid, the port is in use, or the folder has no checkpoint, the command prints one
line and exits with code 2.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxy.commands.arguments import add_commands
from proxy.errors import ConfigurationError, EngineError
from proxy.machine.command_line import (
    PrintVersion,
    escape_unknown_characters,
    find_own_modules,
)
from proxy.machine.compiled_files import compile_elsewhere
from proxy.machine.direct_hosts import reach_directly

if TYPE_CHECKING:
    from proxy.config import ProxyConfig
    from proxy.extra import Invitation


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code of the process."""
    escape_unknown_characters()
    reach_directly()
    compile_elsewhere()
    find_own_modules()
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
    """Runs the proxy until SIGINT or SIGTERM."""
    from proxy.machine.command_line import importing

    with importing():  # imported here to keep --help fast
        import uvloop

        from proxy import process
        from proxy.admin_key import key_file, with_admin_key
        from proxy.config import load_config
        from proxy.extra_registry import LEARNERS
        from proxy.machine import logs
        from proxy.machine.secrecy import hide_memory
        from proxy.settings.late_section import load_extra

    hide_memory()
    config = load_config(arguments.config, **_overrides(arguments))
    if arguments.upstream is not None:
        with_upstream = load_extra("proxy.extras.engines.hosted:with_upstream")
        config = with_upstream(config, arguments.upstream, arguments.upstream_model, os.environ)
    if arguments.learn:
        config = load_extra(LEARNERS)(config, arguments.learn, start=not arguments.no_learner)
    logs.set_up(config.log, config.log_level)
    announce = partial(_announce, None if config.admin_key else key_file(config))
    uvloop.run(process.serve(with_admin_key(config), announce))
    return 0


def _announce(
    admin_key: Path | None, config: ProxyConfig, url: str, said: list[Invitation]
) -> None:
    from proxy.machine.secrecy import without_password  # imported here to keep --help fast
    from proxy.settings.late_section import load_extra

    session = f"{url}/my-session" if config.sessions.auto_create else url
    key = "any" if config.sessions.auto_create else "<a session's key>"
    print(f"recording proxy on {url}, store {without_password(config.store)}")
    print(f"export OPENAI_BASE_URL={session}/v1 OPENAI_API_KEY={key}", flush=True)
    if config.model == load_extra("proxy.extras.engines.hosted:TEXT_ONLY"):
        print("this records text, not tokens: for evaluation and SFT, not for RL", flush=True)
    if admin_key is not None:
        print(f"the admin key is in {admin_key}", flush=True)
    for each in said:
        print(each(url), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="agentic-proxy", description=__doc__)
    parser.add_argument(
        "--version", action=PrintVersion, nargs=0, help="print the version and exit"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add = commands.add_parser("serve", help="run the recording proxy")
    add.set_defaults(run=serve)
    add.add_argument("--config", type=Path, help="a YAML file with settings")
    add.add_argument(
        "--engine",
        action="append",
        metavar="URL",
        help="a running vLLM; may be given several times; without one, a vLLM is started",
    )
    add.add_argument(
        "--upstream",
        metavar="URL",
        help="a hosted model with /v1/chat/completions, such as https://api.openai.com: records its"
        " text, without a GPU or a checkpoint; its key is in OPENAI_API_KEY or ANTHROPIC_API_KEY",
    )
    add.add_argument("--upstream-model", metavar="NAME", help="the hosted model's name")
    add.add_argument(
        "--learn",
        type=Path,
        action="append",
        metavar="FILE",
        help="also run `agentic-train learn --config FILE`, which learns from the sessions",
    )
    add.add_argument(
        "--no-learner",
        action="store_true",
        help="serve what the learners of --learn have made, without starting them",
    )
    add.add_argument("--model", type=Path, help="the folder of the checkpoint that engines serve")
    add.add_argument("--store", metavar="URL", help="sqlite:///FILE or postgresql://…")
    add.add_argument("--host", help="the address to listen on (127.0.0.1)")
    add.add_argument("--port", type=int, help="the port to listen on (8000)")
    add.add_argument("--workers", type=int, metavar="N", help="processes that share the port (1)")
    add.add_argument(
        "--log", choices=["text", "json"], help="format of the log; json also has one line per call"
    )
    add.add_argument(
        "--log-level",
        choices=["debug", "info", "warning", "error"],
        help="the least important messages that are logged (info)",
    )
    add.add_argument(
        "--auto-create",
        action="store_true",
        default=None,
        help="a call to /ANY-ID/v1 creates its session and needs no key; only on loopback",
    )
    add_commands(commands)
    return parser


_PLAIN = ("model", "store", "host", "port", "workers", "log", "log_level")
"""Flags that have the name of their key."""


def _overrides(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(arguments, name) for name in _PLAIN}
    overrides = {name: value for name, value in given.items() if value is not None}
    if arguments.engine:
        overrides["engines"] = [{"url": url} for url in arguments.engine]
    if arguments.auto_create:
        overrides["sessions"] = {"auto_create": True}
    return overrides
