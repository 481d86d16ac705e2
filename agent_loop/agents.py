"""Several agents in one run: which agent tries a task, and the loops that run their trials.

A task's agent is, in this order: the agent whose own `data` the task is from; the agent that the
task's field `data.agent_field` names; an agent without `data` of its own, by the agents' weights.
Invariant: the agent of the n-th draw is a function of the sources, the seed and n alone, so that a
resumed run continues with the same agents.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from pydantic import Field

from agent_loop.endpoint_loop import EndpointLoop
from agent_loop.records import Rollout, Task
from agent_loop.remote_agent_config import RemoteAgentConfig
from agent_loop.remote_agent_loop import RemoteAgentLoop
from agent_loop.task_sources.listed import ListedTasks
from agent_loop.task_sources.protocol import ListsTasks, TaskSource
from agent_loop.tasks import (
    DataConfig,
    Source,
    TaskStream,
    held_out_tasks,
    read_lazily,
    refuse_without_prompt,
    training_sources,
)
from proxy.errors import ConfigurationError
from proxy.records import Origin, SessionKind


class OneOfAgents(RemoteAgentConfig):
    """One of several agents: the keys of `remote_agent`, and these."""

    weight: float = Field(1.0, gt=0)
    """How often the agent gets a task, relative to the others."""
    data: DataConfig | None = None
    """Tasks for this agent alone. None: it shares the section `data` with the other agents without
    tasks of their own."""


@dataclass(frozen=True, slots=True)
class Agents:
    """The agents of a run by name, and the tasks that they share.

    Example: Agents({"shop": OneOfAgents(…), "shell": OneOfAgents(…)}, config.data)
    """

    sections: Mapping[str, OneOfAgents]
    data: DataConfig

    @property
    def sharing(self) -> dict[str, OneOfAgents]:
        """The agents without tasks of their own."""
        return {name: agent for name, agent in self.sections.items() if agent.data is None}

    def training_tasks(self) -> AgentTaskStream:
        """The stream of all tasks to train on, each with its agent.

        Raises:
            ConfigurationError: as `agent_loop.tasks.training_tasks`; a task names no agent.
        """
        sources: list[Source] = []
        owners: dict[str, str] = {}
        for name, agent in self.sections.items():
            if agent.data is not None:
                found = training_sources(agent.data, needs_prompt=agent.needs_prompt)
                own = [_of_agent(name, source, agent.data) for source in found]
                owners |= dict.fromkeys((source.name for source in own), name)
                sources += _with_share(own, agent.weight)
        if sharing := self.sharing:
            needs_prompt = any(agent.needs_prompt for agent in sharing.values())
            shared = training_sources(self.data, needs_prompt=needs_prompt)
            listed = (s.tasks.epoch(0) for s in shared if isinstance(s.tasks, ListedTasks))
            for task in itertools.chain.from_iterable(listed):
                self.named(task)  # refuses an unknown name before the run starts
            sources += _with_share(shared, sum(agent.weight for agent in sharing.values()))
        elif self.data.holds_tasks:
            raise ConfigurationError(
                "data: each of the agents has data of its own, so that nobody tries these tasks; "
                "remove them, or the data of an agent"
            )
        return AgentTaskStream(self, sources, owners)

    def held_out_tasks(self, limit: int | None = None) -> list[Task]:
        """All held-out tasks, each with its agent; at most `limit` of each agent. A shared task
        that names no agent is tried by every agent without tasks of its own.

        Raises:
            ConfigurationError: as `agent_loop.tasks.held_out_tasks`; a task names no agent.
        """
        found: dict[str, list[Task]] = {name: [] for name in self.sections}
        for name, agent in self.sections.items():
            if agent.data is not None:
                tasks = held_out_tasks(agent.data, needs_prompt=agent.needs_prompt)
                found[name] += [replace(task, source=f"{name}/{task.source}") for task in tasks]
        needs_prompt = any(agent.needs_prompt for agent in self.sharing.values())
        for task in held_out_tasks(self.data, needs_prompt=needs_prompt):
            named = self.named(task)
            for name in self.sharing if named is None else (named,):
                found[name].append(task)
        return [replace(task, agent=name) for name in found for task in found[name][:limit]]

    def training_as_held_out(self) -> Agents:
        """The same agents, whose tasks to train on are their held-out ones."""
        sections = {
            name: agent
            if agent.data is None
            else agent.model_copy(update={"data": agent.data.training_as_held_out()})
            for name, agent in self.sections.items()
        }
        return Agents(sections, self.data.training_as_held_out())

    def named(self, task: Task) -> str | None:
        """The agent that the task's field names; None: it names none.

        Raises:
            ConfigurationError: there is no such agent.
        """
        name = task.data.get(self.data.agent_field)
        if name is not None and name not in self.sections:
            raise ConfigurationError(
                f"task {task.task_id!r} of source {task.source!r}: its field "
                f"{self.data.agent_field!r} is {name!r}; the agents are {list(self.sections)}"
            )
        return name


class AgentTaskStream(TaskStream):
    """The tasks of several agents; see `Agents.training_tasks`."""

    def __init__(self, agents: Agents, sources: list[Source], owners: Mapping[str, str]) -> None:
        """`owners`: name of a source → the agent whose own it is."""
        super().__init__(sources, seed=agents.data.seed)
        self._agents = agents
        self._owners = owners

    def draw(self) -> Task:
        number = self.cursor.draws
        task = super().draw()
        agent = self._owners.get(task.source) or self._agents.named(task) or self._choose(number)
        if self._agents.sections[agent].needs_prompt:
            refuse_without_prompt([task])
        return replace(task, agent=agent)

    def _choose(self, number: int) -> str:
        sharing = self._agents.sharing
        weights = np.array([agent.weight for agent in sharing.values()])
        random = np.random.default_rng([self._agents.data.seed, number])
        return list(sharing)[int(random.choice(len(weights), p=weights / weights.sum()))]


def _of_agent(agent: str, source: Source, data: DataConfig) -> Source:
    """An agent's own source, which has the agent's name in its own."""
    name, tasks = (
        f"{agent}/{source.name}",
        read_lazily(source, seed=data.seed, shuffle=data.shuffle),
    )
    return Source(name, _Renamed(name, tasks), source.weight)


@dataclass(frozen=True, slots=True)
class _Renamed:
    """Tasks of a source, under another name of the source."""

    name: str
    source: TaskSource

    @property
    def listed(self) -> Sequence[Task]:
        """Its tasks if they are in memory, under the names of their own source."""
        return self.source.listed if isinstance(self.source, ListsTasks) else ()

    def epoch(self, number: int) -> Iterator[Task]:
        return (replace(task, source=self.name) for task in self.source.epoch(number))


def _with_share(sources: Iterable[Source], share: float) -> list[Source]:
    """The sources, with weights that sum to `share`."""
    sources = list(sources)
    total = sum(source.weight for source in sources)
    return [replace(source, weight=source.weight / total * share) for source in sources]


class AgentLoops:
    """Runs each trial by the loop of its task's agent; a run with one agent has the name "".

    Example: AgentLoops({"": RemoteAgentLoop(…)})
    """

    def __init__(self, loops: Mapping[str, RemoteAgentLoop | EndpointLoop]) -> None:
        self._loops = loops

    async def run(
        self,
        task: Task,
        *,
        kind: SessionKind,
        seed: int = 0,
        version: int = 0,
        origin: Origin | None = None,
    ) -> Rollout:
        """As `RemoteAgentLoop.run`.

        Raises:
            ConfigurationError: the task's agent is no longer part of the run, or `origin` is given
                and the trials are not recorded.
        """
        loop = self._loops.get(task.agent)
        if loop is None:
            raise ConfigurationError(
                f"task {task.task_id!r} is for the agent {task.agent!r}, but this run has "
                f"the agents {list(self._loops)}; keep the agents of the run that is resumed"
            )
        if isinstance(loop, EndpointLoop):
            if origin is not None:
                raise ConfigurationError("trials on an endpoint are not recorded: none can branch")
            return await loop.run(task, kind=kind, seed=seed, version=version)
        return await loop.run(task, kind=kind, seed=seed, version=version, origin=origin)

    async def close(self) -> None:
        """Closes the launchers and the reward sources."""
        for loop in self._loops.values():
            await loop.close()
