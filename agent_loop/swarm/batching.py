"""When a batch is full, and exactly which episodes it holds. Pure: the server only carries it out.

Invariant: a batch holds what met the rule and, where left-overs are trained, what was left over;
every ended episode is in the batch, left over, or (`drop`) dropped, and in one of them only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from agent_loop.swarm.wire import EpisodeView

StopRule = Literal["episodes", "tasks", "tasks_with_signal", "any_client", "all_clients"]


class SwarmSettings(BaseModel):
    """Example: SwarmSettings(stop_rule="tasks", groups=8, group_size=8)"""

    model_config = ConfigDict(extra="forbid", frozen=True)

    stop_rule: StopRule = "tasks"
    """A batch is full with `groups` times `group_size` episodes; with `groups` tasks of
    `group_size` episodes each; with so many tasks whose rewards differ; or when any, or every,
    client that is there agrees (then with all that has ended)."""
    groups: int = Field(8, ge=1)
    group_size: int = Field(8, ge=1)
    left_over: Literal["carry", "drop", "train"] = "carry"
    """Ended episodes that the batch does not hold: kept for the next, dropped and counted, or
    trained as they are. With `tasks_with_signal` a full group of equal rewards is never in a
    batch: but for `train` it is dropped and counted. With `carry` claimed episodes go on while the
    batch is trained; else they may end until `drain_timeout_s`, and are aborted then."""
    drain_timeout_s: float = Field(60.0, ge=0)
    lease_s: float = Field(60.0, gt=0)
    max_life_s: float = Field(3600.0, gt=0)
    """Of an episode, heartbeats or not."""
    max_open: int = Field(256, ge=1)
    """Episodes claimed at a time."""
    max_collected: int = Field(4096, ge=1)
    """Ended episodes that wait for a batch; past it nothing is given out."""
    mix: dict[str, float] = Field(default_factory=dict)
    """Share of a batch's episodes by `source`; empty: any. Others than these get none."""


@dataclass(frozen=True, slots=True)
class Selection:
    groups: list[list[EpisodeView]]
    left: list[EpisodeView]


def select(
    ended: Sequence[EpisodeView],
    settings: SwarmSettings,
    *,
    clients: AbstractSet[str] = frozenset(),
    agreed: AbstractSet[str] = frozenset(),
) -> Selection | None:
    """The batch, if the rule is met; `ended` in the order in which they ended."""
    chosen = _chosen(ended, settings, clients, agreed)
    if not chosen:
        return None
    taken = {episode.episode_id for group in chosen for episode in group}
    left = [episode for episode in ended if episode.episode_id not in taken]
    if settings.left_over == "train":
        return Selection(_with_left(chosen, left), [])
    return Selection(chosen, left)


def without_signal(ended: Sequence[EpisodeView], settings: SwarmSettings) -> Sequence[EpisodeView]:
    """Full groups that `tasks_with_signal` will never take; kept, they would fill every quota."""
    if settings.stop_rule != "tasks_with_signal" or settings.left_over == "train":
        return ()
    groups = _by_task(ended).values()
    full = [group for group in groups if len(group) >= settings.group_size]
    return [episode for group in full if len(set(map(_signal, group))) == 1 for episode in group]


def groups_ready(ended: Sequence[EpisodeView], settings: SwarmSettings) -> int:
    """How many of the wanted groups are there, by the rule."""
    if settings.stop_rule == "episodes":
        return min(settings.groups, len(ended) // settings.group_size)
    return len(_full_groups(ended, settings))


def refusal(
    *,
    task_id: str | None,
    source: str,
    open_: Sequence[EpisodeView],
    ended: Sequence[EpisodeView],
    settings: SwarmSettings,
) -> str | None:
    """Why no training episode is given out now; None: it is."""
    if len(open_) >= settings.max_open:
        return f"{len(open_)} episodes are open, max_open is {settings.max_open}"
    if len(ended) >= settings.max_collected:
        return f"{len(ended)} episodes wait for a batch, max_collected is {settings.max_collected}"
    alive = [episode for episode in (*open_, *ended) if episode.kind == "train"]
    if task_id is not None:
        same = sum(episode.task_id == task_id for episode in alive)
        if same >= settings.group_size:
            return f"task {task_id!r} has {same} episodes, its group takes {settings.group_size}"
    if settings.mix:
        quota = _quota(source, settings)
        same = sum(episode.source == source for episode in alive)
        if same >= quota:
            return f"source {source!r} has {same} episodes, its share of a batch is {quota}"
    return None


def _quota(source: str, settings: SwarmSettings) -> int:
    share = settings.mix.get(source, 0.0) / sum(settings.mix.values())
    return math.ceil(share * settings.groups * settings.group_size)


def _chosen(
    ended: Sequence[EpisodeView],
    settings: SwarmSettings,
    clients: AbstractSet[str],
    agreed: AbstractSet[str],
) -> list[list[EpisodeView]]:
    rule = settings.stop_rule
    if rule == "episodes":
        wanted = settings.groups * settings.group_size
        return list(_by_task(ended[:wanted]).values()) if len(ended) >= wanted else []
    if rule in ("tasks", "tasks_with_signal"):
        full = _full_groups(ended, settings)
        return full[: settings.groups] if len(full) >= settings.groups else []
    here = agreed & clients
    done = bool(here) if rule == "any_client" else bool(clients) and here == clients
    return list(_by_task(ended).values()) if done else []


def _full_groups(ended: Sequence[EpisodeView], settings: SwarmSettings) -> list[list[EpisodeView]]:
    """Tasks with a full group, in the order in which they became full."""
    groups = []
    for episodes in _by_task(ended).values():
        group = episodes[: settings.group_size]
        if len(group) < settings.group_size:
            continue
        if settings.stop_rule == "tasks_with_signal":
            other = [episode for episode in episodes if _signal(episode) != _signal(group[0])]
            if not other:
                continue
            if all(_signal(episode) == _signal(group[0]) for episode in group):
                group[-1] = other[0]
        groups.append(group)
    order = {episode.episode_id: place for place, episode in enumerate(ended)}
    return sorted(groups, key=lambda group: order[group[-1].episode_id])


def _signal(episode: EpisodeView) -> tuple[object, ...]:
    """What must differ within a group for it to teach anything."""
    return (episode.reward, *sorted(episode.turn_rewards.items()))


def _by_task(episodes: Sequence[EpisodeView]) -> Mapping[str, list[EpisodeView]]:
    groups: dict[str, list[EpisodeView]] = {}
    for episode in episodes:
        groups.setdefault(episode.task_id or episode.episode_id, []).append(episode)
    return groups


def _with_left(
    chosen: list[list[EpisodeView]], left: Sequence[EpisodeView]
) -> list[list[EpisodeView]]:
    groups = {group[0].task_id: list(group) for group in chosen}
    for episode in left:
        groups.setdefault(episode.task_id, []).append(episode)
    return list(groups.values())
