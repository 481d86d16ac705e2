"""agentic-swarm: shows and controls the swarm server at URL.

    agentic-swarm watch  URL        show engine and episodes, live
    agentic-swarm status URL        show the status once, as JSON
    agentic-swarm tasks  URL        show what became of each task's episodes, a JSON line each
    agentic-swarm start|stop URL    start or stop the engine

The token is AGENTIC_SWARM_TOKEN, the content of the file that AGENTIC_SWARM_TOKEN_FILE names or,
for a server on this machine, the file `token` in its state folder (--state-dir, runs/swarm unless
given).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from agent_loop.extras.swarm.errors import SwarmError
from agent_loop.extras.swarm.token import DEFAULT_STATE_DIR, client_token
from proxy.machine.command_line import PrintVersion, escape_unknown_characters
from proxy.machine.direct_hosts import reach_directly
from proxy.machine.secrecy import hide_memory

if TYPE_CHECKING:
    from rich.console import Console

    from agent_loop.extras.swarm.client import AsyncSwarmClient


def main(argv: Sequence[str] | None = None) -> int:
    escape_unknown_characters()
    reach_directly()
    arguments = _parser().parse_args(argv)
    hide_memory()
    try:
        asyncio.run(_run(arguments.command, arguments.url, arguments.state_dir))
    except SwarmError as error:
        print(f"agentic-swarm: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="agentic-swarm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action=PrintVersion, nargs=0, help="print the version and exit"
    )
    parser.add_argument("command", choices=["watch", "status", "tasks", "start", "stop"])
    parser.add_argument("url", metavar="URL", help="like http://127.0.0.1:8100")
    parser.add_argument(
        "--state-dir",
        type=Path,
        default=DEFAULT_STATE_DIR,
        help="the server's state folder, if the server runs on this machine",
    )
    return parser


async def _run(command: str, url: str, state_dir: Path) -> None:
    if not _is_address(url):
        raise SwarmError(
            f"URL {url!r}: give the server's address, like http://127.0.0.1:8100", "invalid"
        )
    from agent_loop.extras.swarm.client import AsyncSwarmClient

    token = client_token(url, state_dir)
    async with AsyncSwarmClient(url, token, patience_s=0.0) as swarm:
        if command == "watch":
            from rich.console import Console

            await _watch(swarm, Console())
        elif command == "start":
            print((await swarm.start_engine()).model_dump_json(indent=1))
        elif command == "tasks":
            for task in await swarm.task_counts():
                print(task.model_dump_json())
        elif command == "stop":
            print((await swarm.stop_engine()).model_dump_json(indent=1))
        else:
            print((await swarm.status()).model_dump_json(indent=1))


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of brackets without an end, or of a port that is none
        return False


async def _watch(swarm: AsyncSwarmClient, console: Console) -> None:
    """Shows every change. The server must answer the first request; later it may be away."""
    import time

    from rich.live import Live

    from agent_loop.extras.swarm.client import PATIENCE_S
    from agent_loop.extras.swarm.terminal import SHOWN_EPISODES, picture

    await swarm.status()
    swarm.patience_s = PATIENCE_S
    with Live(console=console, auto_refresh=False) as live:
        async for status in swarm.changes():
            episodes = await swarm.get_episode_buffer(SHOWN_EPISODES)
            live.update(picture(status, episodes, now=time.time()), refresh=True)


if __name__ == "__main__":
    sys.exit(main())
