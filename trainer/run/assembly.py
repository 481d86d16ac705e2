"""From the configuration to the parts of a run; what both mains have in common.

Invariant: everything that can be wrong in a configuration, the task files, the agent's command and
the checkpoint is found here, before a process is started.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import torch

from agent_loop.evaluator import EvalSettings, Evaluator
from agent_loop.harbor_tasks import HarborDataset, read_harbor_dir
from agent_loop.launchers.command import CommandLauncher
from agent_loop.launchers.harbor import HarborLauncher, HarborSettings
from agent_loop.launchers.http import HttpLauncher
from agent_loop.launchers.protocol import Launcher
from agent_loop.launchers.python import PythonLauncher
from agent_loop.producers.asynchronous import AsyncSettings
from agent_loop.producers.groups import BatchSettings
from agent_loop.records import Task
from agent_loop.remote_agent_loop import LoopSettings, RemoteAgentLoop
from agent_loop.rewards.combined import CombinedReward, Weighted
from agent_loop.rewards.grader import Grader
from agent_loop.rewards.judge import Judge
from agent_loop.rewards.protocol import RewardSource
from agent_loop.rewards.reported import LauncherReward, PostedReward
from agent_loop.rewards.verifier import Verifier
from agent_loop.swarm.launcher import SwarmLauncher
from agent_loop.tasks import Source, TaskStream, read_tasks
from proxy.client import ProxyClient
from proxy.records import Ids
from trainer.config import (
    DataConfig,
    RemoteAgentConfig,
    RewardName,
    RolloutConfig,
    TrainerConfig,
)
from trainer.errors import ConfigError
from trainer.policy.learner import Learner, build_learner, check_models
from trainer.policy.parallel import Ranks, Seat
from trainer.policy.probe import probe_ids
from trainer.run.folder import RunFolder

_PROBE = 'The agents\' tasks are with the clients of the swarm. 0123456789, {"name": "value"}.'


@dataclass(slots=True)
class Parts:
    """What a run is made of before any process runs."""

    tasks: TaskStream | None
    """None: a swarm's clients bring theirs."""
    held_out: list[Task]
    launcher: Launcher
    rewards: RewardSource
    probe: Ids

    @property
    def task_stream(self) -> TaskStream:
        assert self.tasks is not None
        return self.tasks

    def loop(self, config: TrainerConfig, folder: RunFolder, proxy: ProxyClient) -> RemoteAgentLoop:
        return RemoteAgentLoop(proxy, self.launcher, self.rewards, loop_settings(config, folder))

    def evaluator(self, config: TrainerConfig, loop: RemoteAgentLoop) -> Evaluator | None:
        """None without held-out tasks."""
        if not self.held_out:
            return None
        evals = config.eval
        settings = EvalSettings(
            rollouts_per_task=evals.repeats,
            ks=tuple(2**i for i in range(evals.repeats.bit_length())),
            success_reward=evals.success_at,
            max_concurrent=config.rollout.concurrency,
        )
        return Evaluator(loop, self.held_out, settings, seed=config.trainer.seed)


def assemble(config: TrainerConfig) -> Parts:
    """
    Raises:
        ConfigError, proxy.errors.ConfigurationError: one line that names the key or file.
    """
    check_models(config.model, config.algorithm)
    launcher, rewards = _launcher(config), _rewards(config.remote_agent)
    tasks = None if config.swarm else _training_tasks(config.data)
    held_out = _held_out_tasks(config)
    probe = probe_ids(config.model.path, _probe_text(tasks, held_out))
    return Parts(tasks, held_out, launcher, rewards, probe)


def build_models(config: TrainerConfig, seat: Seat | None = None) -> Learner:
    """The models, on the configured device; with a `seat` this rank's part of them, once all ranks
    have joined.

    Raises:
        ConfigError: a path is not a checkpoint of a causal model.
    """
    name = config.trainer.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and seat is not None:
        name = f"cuda:{seat.local_rank}"
    device = torch.device(name)
    ranks = Ranks() if seat is None else Ranks.join(seat, device)
    torch.manual_seed(config.trainer.seed)
    return build_learner(
        config.model,
        config.optimizer,
        config.algorithm,
        device=device,
        ranks=ranks,
        batches=config.trainer.steps,
    )


def _probe_text(tasks: TaskStream | None, held_out: Sequence[Task]) -> str:
    """Of a task, where there is one: text as the agents' is."""
    if held_out:
        task = held_out[0]
    elif tasks is not None:
        task = tasks.draw()
        tasks.restore({})
    else:
        return _PROBE
    return orjson.dumps(dict(task.data), default=str).decode()


def _launcher(config: TrainerConfig) -> Launcher:
    agent = config.remote_agent
    if not agent.agents:
        return SwarmLauncher()
    if agent.command is not None:
        return CommandLauncher(agent.command)
    if agent.python is not None:
        return PythonLauncher(agent.python)
    if agent.http is not None:
        return HttpLauncher(agent.http)
    harbor = HarborSettings(**agent.model_dump(include=set(HarborSettings.model_fields)))
    return HarborLauncher(harbor, config.data.harbor_roots)


def _rewards(agent: RemoteAgentConfig) -> RewardSource:
    sources: dict[RewardName, RewardSource] = {}
    if agent.verifier is not None:
        sources["verifier"] = Verifier(agent.verifier)
    if agent.grader is not None:
        sources["grader"] = Grader(agent.grader)
    if agent.judge is not None:
        sources["judge"] = Judge(agent.judge)
    if agent.posted_rewards:
        sources["posted"] = PostedReward()
    unknown = agent.reward_weights.keys() - sources.keys()
    if unknown:
        raise ConfigError(
            f"remote_agent.reward_weights: {sorted(unknown)} is not configured; there are "
            f"{list(sources) or 'no reward sources'}"
        )
    if not sources:
        return LauncherReward()
    if len(sources) == 1 and not agent.reward_weights:
        return next(iter(sources.values()))
    weights = agent.reward_weights
    return CombinedReward({n: Weighted(s, weights.get(n, 1.0)) for n, s in sources.items()})


def batch_settings(config: TrainerConfig) -> BatchSettings:
    return BatchSettings(**_batch(config.rollout))


def async_settings(config: TrainerConfig) -> AsyncSettings:
    rollout = config.rollout
    return AsyncSettings(
        **_batch(rollout),
        max_staleness=rollout.max_staleness,
        stale=rollout.stale,
        over_sample=rollout.over_sample,
        partial_rollout=rollout.partial_rollout,
        tail_groups=rollout.tail_groups,
    )


def _batch(rollout: RolloutConfig) -> dict[str, Any]:
    return {
        "groups": rollout.groups_per_step,
        "group_size": rollout.group_size,
        "max_concurrent": rollout.concurrency,
        "min_group_size": rollout.min_group_size,
        "drop_uniform": rollout.drop_uniform_groups,
        "max_resamples": rollout.max_resamples,
        "straggler_factor": rollout.straggler_factor,
    }


def loop_settings(config: TrainerConfig, folder: RunFolder) -> LoopSettings:
    rollout, agent = config.rollout, config.remote_agent
    is_harbor = bool(agent.agent_name or agent.agent_import_path)
    margin_s = agent.harbor_server_timeout if is_harbor else 300.0
    sampling: dict[str, float | int] = {"temperature": rollout.temperature}
    sampling |= {"top_p": rollout.top_p, "top_k": rollout.top_k}
    if rollout.max_tokens is not None:
        sampling["max_tokens"] = rollout.max_tokens
    return LoopSettings(
        trials_dir=folder.trials,
        model=agent.model_name,
        timeout_s=agent.timeout_s,
        session_margin_s=max(margin_s, agent.await_reward_s),
        max_retries=agent.max_retries,
        retry_base_delay_s=agent.retry_base_delay,
        sampling=sampling,
        seeded=rollout.seeded,
        profile=config.proxy_server.profile,
        session_limits={} if rollout.max_turns is None else {"max_turns": rollout.max_turns},
        credit=agent.credit,
        await_reward_s=agent.await_reward_s,
        keep_workspaces=agent.keep_workspaces,
        proxy_patience_s=config.proxy_server.patience_s,
    )


def _training_tasks(data: DataConfig) -> TaskStream:
    if not data.train_files and not data.train_harbor_dir:
        raise ConfigError(
            "data.train_files: missing; give at least one file of tasks, or a folder of "
            "Harbor tasks in data.train_harbor_dir"
        )
    read = {file.stem: read_tasks(file) for file in data.train_files}
    for root in data.train_harbor_dir:
        dataset = _harbor_dataset(data, root, data.harbor_train_limit)
        read.setdefault(dataset.source, []).extend(read_harbor_dir(dataset))
    sources = [Source(name, tasks, data.weights.get(name, 1.0)) for name, tasks in read.items()]
    unknown = set(data.weights) - read.keys()
    if unknown:
        raise ConfigError(f"data.weights: {sorted(unknown)} name no source; there are {list(read)}")
    return TaskStream(sources, seed=data.seed, shuffle=data.shuffle)


def _held_out_tasks(config: TrainerConfig) -> list[Task]:
    data = config.data
    _refuse_shared(data.train_files, data.val_files, "files")
    _refuse_shared(data.train_harbor_dir, data.val_harbor_dir, "harbor_dir")
    tasks = [task for file in data.val_files for task in read_tasks(file)]
    for root in data.val_harbor_dir:
        tasks += read_harbor_dir(_harbor_dataset(data, root, data.harbor_val_limit))
    return tasks[: config.eval.limit]


def _refuse_shared(train: Sequence[Path], held_out: Sequence[Path], key: str) -> None:
    trained = {path.resolve() for path in train}
    both = [path for path in held_out if path.resolve() in trained]
    if both:
        raise ConfigError(f"data.val_{key}: {both[0]} is in data.train_{key} too; hold it out")


def _harbor_dataset(data: DataConfig, root: Path, limit: int | None) -> HarborDataset:
    return HarborDataset(
        root,
        source=data.harbor_data_source or root.name,
        ability=data.harbor_ability,
        limit=limit,
        cache_dir=data.harbor_cache_dir,
        overwrite=data.harbor_overwrite,
    )
