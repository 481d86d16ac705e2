"""From the configuration to the parts of a run; what both mains have in common.

Invariant: everything that can be wrong in a configuration, the task files, the agent's command and
the checkpoint is found here, before a process is started.
"""

from __future__ import annotations

from dataclasses import dataclass

import orjson
import torch

from agent_loop.evaluator import EvalSettings, Evaluator
from agent_loop.launchers.command import CommandLauncher
from agent_loop.launchers.protocol import Launcher
from agent_loop.producers.sync import BatchSettings
from agent_loop.records import Task
from agent_loop.remote_agent_loop import LoopSettings, RemoteAgentLoop
from agent_loop.rewards.protocol import RewardSource
from agent_loop.rewards.verifier import Verifier
from agent_loop.tasks import Source, TaskStream, read_jsonl
from proxy.client import ProxyClient
from proxy.records import Ids
from trainer.config import DataConfig, TrainerConfig
from trainer.errors import ConfigError
from trainer.policy import Policy
from trainer.probe import probe_ids
from trainer.run_folder import RunFolder


@dataclass(slots=True)
class Parts:
    """What a run is made of before any process runs."""

    policy: Policy
    tasks: TaskStream
    held_out: list[Task]
    launcher: Launcher
    rewards: RewardSource | None
    probe: Ids

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
    agent = config.remote_agent
    assert agent.command is not None
    launcher = CommandLauncher(agent.command)
    rewards = None if agent.verifier is None else Verifier(agent.verifier)
    tasks, held_out = _training_tasks(config.data), _held_out_tasks(config)
    text = orjson.dumps(dict((held_out or [tasks.draw()])[0].data), default=str).decode()
    probe = probe_ids(config.model.path, text)
    tasks.restore({})
    return Parts(_policy(config), tasks, held_out, launcher, rewards, probe)


def batch_settings(config: TrainerConfig) -> BatchSettings:
    rollout = config.rollout
    return BatchSettings(
        groups=rollout.groups_per_step,
        group_size=rollout.group_size,
        max_concurrent=rollout.concurrency,
    )


def loop_settings(config: TrainerConfig, folder: RunFolder) -> LoopSettings:
    rollout, agent = config.rollout, config.remote_agent
    sampling: dict[str, float | int] = {"temperature": rollout.temperature}
    sampling |= {"top_p": rollout.top_p, "top_k": rollout.top_k}
    if rollout.max_tokens is not None:
        sampling["max_tokens"] = rollout.max_tokens
    return LoopSettings(
        trials_dir=folder.trials,
        model=agent.model_name,
        timeout_s=agent.timeout_s,
        max_retries=agent.max_retries,
        sampling=sampling,
        seeded=rollout.seeded,
        profile=config.proxy_server.profile,
        session_limits={} if rollout.max_turns is None else {"max_turns": rollout.max_turns},
        keep_workspaces=agent.keep_workspaces,
        proxy_patience_s=config.proxy_server.patience_s,
    )


def _training_tasks(data: DataConfig) -> TaskStream:
    if not data.train_files:
        raise ConfigError("data.train_files: missing; give at least one JSONL file of tasks")
    sources = [
        Source(file.stem, read_jsonl(file), data.weights.get(file.stem, 1.0))
        for file in data.train_files
    ]
    unknown = set(data.weights) - {source.name for source in sources}
    if unknown:
        raise ConfigError(
            f"data.weights: {sorted(unknown)} name no source; there are "
            f"{[source.name for source in sources]}"
        )
    return TaskStream(sources, seed=data.seed, shuffle=data.shuffle)


def _held_out_tasks(config: TrainerConfig) -> list[Task]:
    tasks = [task for file in config.data.val_files for task in read_jsonl(file)]
    trained = {str(file.resolve()) for file in config.data.train_files}
    both = [file for file in config.data.val_files if str(file.resolve()) in trained]
    if both:
        raise ConfigError(f"data.val_files: {both[0]} is in data.train_files too; hold it out")
    return tasks[: config.eval.limit]


def _policy(config: TrainerConfig) -> Policy:
    device = config.trainer.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(config.trainer.seed)
    return Policy(config.model, config.optimizer, device=device, total_steps=config.trainer.steps)
