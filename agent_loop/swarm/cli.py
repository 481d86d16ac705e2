"""`agentic-swarm watch URL`: the swarm as it is now, in the terminal, changed when it changes.

    agentic-swarm watch  URL        live
    agentic-swarm status URL        once, as JSON
    agentic-swarm start|stop URL    the engine

The token is taken from AGENTIC_SWARM_TOKEN.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from agent_loop.swarm.client import AsyncSwarmClient
from agent_loop.swarm.errors import SwarmError
from agent_loop.swarm.wire import EngineState, EpisodeState, EpisodeView, Status

TOKEN_VARIABLE = "AGENTIC_SWARM_TOKEN"
SHOWN_EPISODES = 20
_COLOURS = {EngineState.ROLLING: "green", EngineState.ERROR: "red", EngineState.OFFLINE: "dim"}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="agentic-swarm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=["watch", "status", "start", "stop"])
    parser.add_argument("url")
    arguments = parser.parse_args(argv)
    try:
        asyncio.run(_run(arguments.command, arguments.url))
    except SwarmError as error:
        print(f"agentic-swarm: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


async def _run(command: str, url: str) -> None:
    async with AsyncSwarmClient(url, os.environ.get(TOKEN_VARIABLE)) as swarm:
        if command == "watch":
            await _watch(swarm, Console())
        elif command == "start":
            print((await swarm.start_engine()).model_dump_json(indent=1))
        elif command == "stop":
            print((await swarm.stop_engine()).model_dump_json(indent=1))
        else:
            print((await swarm.status()).model_dump_json(indent=1))


async def _watch(swarm: AsyncSwarmClient, console: Console) -> None:
    with Live(console=console, auto_refresh=False) as live:
        async for status in swarm.changes():
            episodes = await swarm.get_episode_buffer(SHOWN_EPISODES)
            live.update(picture(status, episodes, now=time.time()), refresh=True)


def picture(status: Status, episodes: Sequence[EpisodeView], *, now: float) -> Group:
    """What `watch` shows."""
    head = Text.assemble(
        (status.state.value, f"bold {_COLOURS.get(status.state, 'yellow')}"),
        f"  version {status.version}  batch {status.batch}  ",
        f"groups {status.groups_ready}/{status.groups_wanted}  ",
        f"open {status.open_episodes}  collected {status.collected}  ",
        f"clients {len(status.clients)}  agreed {len(status.agreed)}",
    )
    if status.mean_reward is not None:
        head.append(f"  mean reward {status.mean_reward:.3f}")
    if status.detail:
        head.append(f"\n{status.detail}", "red" if status.state is EngineState.ERROR else "dim")
    counts = "  ".join(f"{state} {count}" for state, count in sorted(status.counts.items()))
    table = Table("episode", "client", "task", "state", "reward", "age", box=None)
    for episode in episodes[:SHOWN_EPISODES]:
        style = "bold" if episode.state is EpisodeState.CLAIMED else ""
        table.add_row(
            episode.episode_id,
            episode.client_id,
            episode.task_id or "",
            episode.state.value,
            "" if episode.reward is None else f"{episode.reward:g}",
            f"{now - episode.claimed_at:.0f} s",
            style=style,
        )
    return Group(head, Text(counts, "dim"), table)


if __name__ == "__main__":
    sys.exit(main())
