"""What `agentic-swarm watch` shows: the engine in one line, and a table of episodes."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from agent_loop.extras.swarm.wire import EngineState, EpisodeState, EpisodeView, Status

SHOWN_EPISODES = 20
_COLOURS = {EngineState.ROLLING: "green", EngineState.ERROR: "red", EngineState.OFFLINE: "dim"}


def picture(status: Status, episodes: Sequence[EpisodeView], *, now: float) -> Group:
    """`now`: Unix seconds, for the episodes' ages."""
    counts = "  ".join(f"{state} {count}" for state, count in sorted(status.counts.items()))
    return Group(_head(status), Text(counts, "dim"), _table(episodes[:SHOWN_EPISODES], now))


def _head(status: Status) -> Text:
    head = Text.assemble(
        (status.state.value, f"bold {_COLOURS.get(status.state, 'yellow')}"),
        f"  version {status.version}  batch {status.batch}  ",
        f"groups {status.groups_ready}/{status.groups_wanted}  ",
        f"open {status.open_episodes}  collected {status.collected}  ",
        f"clients {len(status.clients)}  agreed {len(status.agreed)}",
    )
    if status.mean_reward is not None:
        head.append(f"  mean reward {status.mean_reward:.3f}")
    if status.warning:
        head.append(f"\n{status.warning}", "yellow")
    if status.detail:
        head.append(f"\n{status.detail}", "red" if status.state is EngineState.ERROR else "dim")
    return head


def _table(episodes: Sequence[EpisodeView], now: float) -> Table:
    table = Table("episode", "client", "task", "state", "reward", "age", box=None)
    for episode in episodes:
        table.add_row(
            episode.episode_id,
            episode.client_id,
            episode.task_id or "",
            episode.state.value,
            "" if episode.reward is None else f"{episode.reward:g}",
            f"{now - episode.claimed_at:.0f} s",
            style="bold" if episode.state is EpisodeState.CLAIMED else "",
        )
    return table
