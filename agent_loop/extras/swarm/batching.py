"""When a batch is full, and which episodes it holds.

`select` is a pure function of the ended episodes. `Collected` keeps the same answer up to date at a
constant cost for each episode that ends. Invariant: a batch holds the groups that met the stop rule
and, with `left_over: train`, the rest; every ended episode is in the batch, left over or dropped,
and in exactly one of these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from agent_loop.extras.swarm.config import BatchPlan
from agent_loop.extras.swarm.episode import Episode
from agent_loop.extras.swarm.wire import EpisodeView

Signal = tuple[object, ...]
WARNING_SHARE = 0.8
"""Share of `swarm.max_collected` from which the server warns, before claims have to wait."""


@dataclass(frozen=True, slots=True)
class Selection:
    """A batch: groups of episodes of one task, and the ended episodes outside it."""

    groups: list[list[Episode]]
    left: list[Episode]


@dataclass(slots=True)
class _TaskEpisodes:
    """The ended episodes of one task, by id, in the order in which they ended."""

    episodes: dict[str, Episode] = field(default_factory=dict)
    signals: Counter[Signal] = field(default_factory=Counter)


class Collected:
    """Ended training episodes that wait for a batch, indexed by task.

    Example: collected.add(episode); collected.is_full; collected.select()
    """

    def __init__(self, plan: BatchPlan, episodes: Iterable[Episode] = ()) -> None:
        self.plan = plan
        self.is_agreed = False
        """Whether the clients that the stop rule names have asked for the update."""
        self._episodes: dict[str, Episode] = {}
        self._tasks: dict[str, _TaskEpisodes] = {}
        self._ready: set[str] = set()
        self._without_signal: set[str] = set()
        for episode in episodes:
            self.add(episode)

    def __len__(self) -> int:
        return len(self._episodes)

    def __iter__(self) -> Iterator[Episode]:
        """In the order in which they ended."""
        return iter(self._episodes.values())

    @property
    def groups_ready(self) -> int:
        """Number of complete groups of the next batch."""
        if self.plan.swarm.stop_rule == "episodes":
            return min(self.plan.rollout.groups_per_step, len(self) // self.plan.rollout.group_size)
        return len(self._ready)

    @property
    def is_full(self) -> bool:
        rule = self.plan.swarm.stop_rule
        if rule == "episodes":
            return len(self) >= self.plan.episodes
        if rule in ("tasks", "tasks_with_signal"):
            return len(self._ready) >= self.plan.rollout.groups_per_step
        return self.is_agreed and bool(self._episodes)

    @property
    def warning(self) -> str:
        """A message from 80 % of `swarm.max_collected` on; empty below it."""
        limit = self.plan.swarm.max_collected
        if len(self) < WARNING_SHARE * limit:
            return ""
        return (
            f"{len(self)} ended episodes wait for a batch; at swarm.max_collected={limit} claims "
            "wait, too. Complete the groups of fewer tasks at a time, or raise swarm.max_collected"
        )

    def add(self, episode: Episode) -> None:
        task = _task(episode.view)
        self._episodes[episode.episode_id] = episode
        of_task = self._tasks.setdefault(task, _TaskEpisodes())
        of_task.episodes[episode.episode_id] = episode
        of_task.signals[signal(episode.view)] += 1
        self._classify(task)

    def remove(self, episodes: Iterable[Episode]) -> None:
        for episode in episodes:
            task = _task(episode.view)
            del self._episodes[episode.episode_id]
            of_task = self._tasks[task]
            del of_task.episodes[episode.episode_id]
            of_task.signals -= Counter([signal(episode.view)])
            self._classify(task)
            if not of_task.episodes:
                del self._tasks[task]

    def without_signal(self) -> list[Episode]:
        """Full groups of equal rewards. The stop rule never takes them; if they were kept, they
        would use up every quota."""
        return [e for task in self._without_signal for e in self._tasks[task].episodes.values()]

    def select(self) -> Selection | None:
        """The batch, if it is full."""
        return select(list(self), self.plan) if self.is_full else None

    def _classify(self, task: str) -> None:
        of_task, rules = self._tasks[task], self.plan.swarm
        is_complete = len(of_task.episodes) >= self.plan.rollout.group_size
        needs_signal = rules.stop_rule == "tasks_with_signal"
        has_signal = len(of_task.signals) > 1
        never = needs_signal and not has_signal and rules.left_over != "train"
        _put(self._ready, task, is_complete and (has_signal or not needs_signal))
        _put(self._without_signal, task, is_complete and never)


def select(ended: Sequence[Episode], plan: BatchPlan) -> Selection:
    """The batch of a stop rule that is met; `ended` in the order in which they ended."""
    chosen = _chosen(ended, plan)
    taken = {episode.episode_id for group in chosen for episode in group}
    left = [episode for episode in ended if episode.episode_id not in taken]
    if plan.swarm.left_over == "train":
        return Selection(_with_left(chosen, left), [])
    return Selection(chosen, left)


def signal(view: EpisodeView) -> Signal:
    """What must differ within a group so that its advantages are not all 0."""
    return (view.reward, *sorted(view.turn_rewards.items()))


def _chosen(ended: Sequence[Episode], plan: BatchPlan) -> list[list[Episode]]:
    rule = plan.swarm.stop_rule
    if rule == "episodes":
        return list(_by_task(ended[: plan.episodes]).values())
    if rule in ("tasks", "tasks_with_signal"):
        return _full_groups(ended, plan)[: plan.rollout.groups_per_step]
    return list(_by_task(ended).values())


def _full_groups(ended: Sequence[Episode], plan: BatchPlan) -> list[list[Episode]]:
    """One full group of each task that has one, in the order in which the groups became full."""
    groups = []
    for episodes in _by_task(ended).values():
        group = episodes[: plan.rollout.group_size]
        if len(group) < plan.rollout.group_size:
            continue
        if plan.swarm.stop_rule == "tasks_with_signal":
            first = signal(group[0].view)
            other = [episode for episode in episodes if signal(episode.view) != first]
            if not other:
                continue
            if all(signal(episode.view) == first for episode in group):
                group[-1] = other[0]
        groups.append(group)
    order = {episode.episode_id: place for place, episode in enumerate(ended)}
    return sorted(groups, key=lambda group: order[group[-1].episode_id])


def _task(view: EpisodeView) -> str:
    return view.task_id or view.episode_id


def _by_task(episodes: Sequence[Episode]) -> Mapping[str, list[Episode]]:
    groups: dict[str, list[Episode]] = {}
    for episode in episodes:
        groups.setdefault(_task(episode.view), []).append(episode)
    return groups


def _with_left(chosen: list[list[Episode]], left: Sequence[Episode]) -> list[list[Episode]]:
    groups = {_task(group[0].view): list(group) for group in chosen}
    for episode in left:
        groups.setdefault(_task(episode.view), []).append(episode)
    return list(groups.values())


def _put(tasks: set[str], task: str, is_member: bool) -> None:
    (tasks.add if is_member else tasks.discard)(task)
