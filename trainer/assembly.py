"""Builds the parts of a run from the configuration; `trainer.mains.opening` starts its processes.

Invariant: `assemble` finds all errors that can be found in the configuration, the task files, the
agent's command and the checkpoint, before any process is started.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import orjson

from agent_loop.agents import AgentLoops, Agents
from agent_loop.endpoint_loop import Endpoint, EndpointLoop
from agent_loop.evaluator import Evaluator
from agent_loop.launchers.protocol import Launcher
from agent_loop.processes.host import StartsEarly
from agent_loop.producers.protocol import Producer, RunsTrials
from agent_loop.records import Group, Rollout, Task
from agent_loop.remote_agent_config import RemoteAgentConfig
from agent_loop.remote_agent_loop import RemoteAgentLoop
from agent_loop.rewards.protocol import RewardSource
from agent_loop.tasks import (
    TaskStream,
    held_out_tasks,
    trained_too,
    training_tasks,
    with_own_tasks,
)
from agent_loop.trial.folders import FinishedTrials
from proxy.admin_key import kept_files
from proxy.client import ProxyClient
from proxy.engines import vllm_platform
from proxy.machine.direct_hosts import reach_directly
from proxy.machine.landlock import missing
from proxy.records import Ids
from proxy.settings.late_section import load_extra
from trainer.cluster.device_plan import fitted, gpus_here
from trainer.cluster.ranks import device_of
from trainer.config import TrainerConfig
from trainer.engine import check_platform
from trainer.errors import ConfigError
from trainer.learning.model_checks import check_models
from trainer.optimizer_config import check_optimizer
from trainer.run.folder import RunFolder
from trainer.run.own_metrics import own_metrics
from trainer.run.preflight import Preflight
from trainer.weight_sync.probe import probe_ids

_SWARM_PROBE = 'The clients of the swarm hold the tasks. 0123456789, {"name": "value"}.'


@dataclass(frozen=True, slots=True)
class AgentParts:
    """One agent: its section, its launcher and its rewards."""

    config: RemoteAgentConfig
    launcher: Launcher
    rewards: RewardSource


@dataclass(slots=True)
class RunParts:
    """The parts of a run that exist before any process is started."""

    config: TrainerConfig
    held_out: list[Task]
    agents: Mapping[str, AgentParts]
    """By name; a single agent has the name ""."""
    probe: Ids
    """The text, as token ids, on which trainer and engines are compared."""

    @property
    def main(self) -> str:
        """The name of the main that trains with these parts (`trainer.mains.registry`)."""
        return self.config.trainer.mode

    def loop(
        self,
        folder: RunFolder,
        proxy: ProxyClient,
        hidden: Sequence[Path] = (),
        ports: Callable[[], frozenset[int]] = frozenset,
        on_rollout: Callable[[Rollout], None] = lambda _: None,
    ) -> AgentLoops:
        """The loop that runs single trials; it calls `on_rollout` with each rollout. Agents do not
        see the `hidden` folders, and do not reach the `ports` of this machine."""
        config, finished = self.config, FinishedTrials(folder.trials, self.config.retention)
        loops = {
            name: RemoteAgentLoop(
                proxy,
                agent.launcher,
                agent.rewards,
                folder.trials,
                trial=agent.config,
                sampling=config.sampled,
                recording=config.proxy_server,
                policy=config.model.policy,
                trained=config.trained_policies,
                hidden=[*self.hidden(agent, folder), *hidden, *kept_files()],
                shown=agent.config.shown_files,
                finished=finished,
                private_ports=ports if missing() is None else frozenset,
                on_rollout=on_rollout,
            )
            for name, agent in self.agents.items()
        }
        return AgentLoops(loops)

    def endpoint_loop(self, endpoint: Endpoint, folder: RunFolder) -> AgentLoops:
        """The loop that runs single trials on a model that the agents call themselves."""
        loops = {
            name: EndpointLoop(
                endpoint,
                agent.launcher,
                agent.rewards,
                folder.trials,
                agent.config,
                self.hidden(agent, folder),
                agent.config.shown_files,
            )
            for name, agent in self.agents.items()
        }
        return AgentLoops(loops)

    def hidden(self, agent: AgentParts, folder: RunFolder) -> list[Path]:
        """The files of the run, of its tasks and of its rewards, which this agent must not read.
        A file that is also the agent's is not among them."""
        data = [
            self.config.data,
            *(own for each in self.config.agents.values() if (own := each.data)),
        ]
        files = [path for section in data for path in section.private_files]
        files += [path for each in self.agents.values() for path in each.config.private_files]
        return [folder.path, *(path for path in files if not agent.config.owns(path))]

    @asynccontextmanager
    async def agents_started(self) -> AsyncIterator[None]:
        """A context in which the processes from which trials are forked run already, and after
        which they have ended."""
        parts = [part for agent in self.agents.values() for part in (agent.launcher, agent.rewards)]
        early = [part for part in parts if isinstance(part, StartsEarly)]
        try:
            for part in early:
                part.start()
            yield
        finally:
            for part in early:
                await part.close()

    @property
    def trials_per_step(self) -> int:
        """Number of trials of a step; 0 if trials also run between the steps."""
        rollout = self.config.rollout
        alternates = self.config.trainer.mode == "colocated" and self.config.swarm is None
        return rollout.groups_per_step * rollout.group_size if alternates else 0

    def own_producer(self, loop: RunsTrials) -> Producer | None:
        """The producer of the user's own; None: the run has none."""
        return None

    def preflight(
        self, loop: RunsTrials, folder: RunFolder, say: Callable[[str], None]
    ) -> Preflight | None:
        """The trial that is run first; None: none is."""
        return None

    def evaluator(self, loop: RunsTrials) -> Evaluator | None:
        """The evaluator; None if there are no held-out tasks."""
        if not self.held_out:
            return None
        return Evaluator(
            loop,
            self.held_out,
            self.config.eval,
            concurrency=self.config.rollout.concurrency,
            seed=self.config.trainer.seed,
        )


@dataclass(slots=True)
class SwarmParts(RunParts):
    """Parts of a run whose tasks come from the clients of a swarm. Its own agent only
    evaluates."""

    @property
    def main(self) -> str:
        return "swarm"


@dataclass(slots=True)
class TaskParts(RunParts):
    """Parts of a run that draws its own tasks and runs its own agents."""

    tasks: TaskStream

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is allowed, and is most often a mistake: the same tasks in training and held out.
        Tasks that are read one by one are not seen."""
        both = trained_too(self.held_out, self.tasks.listed())
        if not both:
            return ()
        return (
            f"data: {len(both)} of {len(self.held_out)} held-out tasks are also tasks to train on "
            f"(the first is {both[0].task_id!r} of {both[0].source!r}), so that an evaluation "
            "counts what was trained; remove them from one of both",
        )

    def own_producer(self, loop: RunsTrials) -> Producer | None:
        rollout, seed = self.config.rollout, self.config.trainer.seed
        make = rollout.producer
        return None if make is None else make(loop, self.tasks, rollout, seed)

    def preflight(
        self, loop: RunsTrials, folder: RunFolder, say: Callable[[str], None]
    ) -> Preflight | None:
        limit_s = self.config.trainer.preflight_s
        if not limit_s:
            return None
        first = self.tasks.state()
        tasks = [self.tasks.draw(), self.tasks.draw()]
        self.tasks.restore(first)
        wanted, metrics = self.config.rollout.filter, self.config.logging.metrics
        checks: list[Callable[[Group], object]] = [] if wanted is None else [wanted]
        checks.append(lambda group: own_metrics(metrics, group.rollouts, ()))
        return Preflight(loop, tasks, limit_s, folder.trials, checks, say)


def _check_engines(config: TrainerConfig) -> None:
    if config.engine.urls or not config.engine.replicas:
        return
    known = config.cluster.backend == "local" and config.trainer.device != "cpu"
    gpus = bool(gpus_here()) if known else None
    check_platform(config.engine, config.model, vllm_platform.installed(), gpus=gpus)


def assemble(config: TrainerConfig) -> SwarmParts | TaskParts:
    """Checks the configuration and builds the parts.

    Raises:
        ConfigError, proxy.errors.ConfigurationError: one line that names the key or file.
    """
    check_models(config.model, config.algorithm, config.trainer.parallelism)
    check_optimizer(config.optimizer)
    if (critic := config.algorithm.critic) is not None:
        check_optimizer(critic.optimizer, "algorithm.critic.optimizer")
    if config.proxy_server.llm_proxy_ip is not None:
        reach_directly(f"http://{config.proxy_server.llm_proxy_ip}")
    if config.relay_workers and config.engine.publish is None:
        raise ConfigError(
            "relay.workers: new weights do not reach engines behind the relay by themselves; set "
            "engine.publish to a URL that trainer and workers reach, or use the workers with "
            "`agentic-train eval` and `collect`, whose weights do not change"
        )
    _check_engines(config)
    if config.cluster.backend == "local":
        device_of(config.trainer.device)
        config = fitted(config, gpus_here())
    in_swarm = config.swarm is not None
    agents = build_agents(config.agent_sections, in_swarm=in_swarm)
    if config.agents:
        several = Agents(config.agents, config.data)
        held_out = several.held_out_tasks(config.eval.limit)
    else:
        data = with_own_tasks(config.data, config.remote_agent.agent)
        needs_prompt = config.remote_agent.needs_prompt
        held_out = held_out_tasks(data, needs_prompt=needs_prompt)[: config.eval.limit]
    if config.trainer.stop_at_success is not None and not held_out:
        raise ConfigError(
            f"trainer.stop_at_success={config.trainer.stop_at_success:g}: there are no held-out "
            "tasks whose success could reach it; set data.val_files, or remove "
            "trainer.stop_at_success"
        )
    text = _text(held_out[0]) if held_out else ""
    if in_swarm:
        probe = probe_ids(config.model.path, text or _SWARM_PROBE)
        return SwarmParts(config, held_out, agents, probe)
    tasks = (
        several.training_tasks()
        if config.agents
        else training_tasks(data, needs_prompt=needs_prompt)
    )
    probe = probe_ids(config.model.path, text or _text(tasks.draw()))
    tasks.restore({})
    return TaskParts(config, held_out, agents, probe, tasks)


def build_agents(
    sections: Mapping[str, RemoteAgentConfig], *, in_swarm: bool = False
) -> dict[str, AgentParts]:
    """The agents of a run by name. In a swarm, an agent may be missing: clients run theirs.

    Raises:
        proxy.errors.ConfigurationError: a launcher or a reward cannot work on this machine.
    """
    agents: dict[str, AgentParts] = {}
    for name, section in sections.items():
        section.check_sandbox()
        section.check_scripts(f"agents.{name}" if name else "remote_agent")
        is_missing = in_swarm and not section.agents
        launcher = _of_clients() if is_missing else section.build_launcher()
        agents[name] = AgentParts(section, launcher, section.build_rewards())
    return agents


def _of_clients() -> Launcher:
    launcher: Launcher = load_extra("agent_loop.extras.swarm.launcher:SwarmLauncher")()
    return launcher


def _text(task: Task) -> str:
    """The text of a task, which is similar to what agents send."""
    return orjson.dumps(dict(task.data), default=str).decode()
