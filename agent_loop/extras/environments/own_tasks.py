"""Tasks that come with an agent: where the section `data` names none, those of its environment.

With them, `remote_agent.verifiers.env: gsm8k-v1` is a whole task set.
"""

from __future__ import annotations

from agent_loop.extras.environments.task_source import ResetTasks, VerifiersTasks
from agent_loop.extras.environments.verifiers import VerifiersEnvironment
from agent_loop.remote_agent_config import RemoteAgentConfig
from agent_loop.task_sources.protocol import TaskSourceConfig
from agent_loop.task_sources.registry import AnyTaskSource
from agent_loop.tasks import DataConfig


def with_own_tasks(data: DataConfig, agent: RemoteAgentConfig) -> DataConfig:
    """The section `data`, with the tasks of the agent's environment if it has no tasks to train
    on."""
    if data.train_files or data.train_harbor_dir or data.train_sources:
        return data
    train: TaskSourceConfig
    held_out: TaskSourceConfig | None = None
    if (env := agent.verifiers) is not None:
        shared = {name: getattr(env, name) for name in VerifiersEnvironment.model_fields}
        kind, name, first = "verifiers", env.env, env.held_out
        train = VerifiersTasks(**shared, skip=first)
        if first:
            held_out = VerifiersTasks(**shared, take=first)
    elif (server := agent.openenv) is not None:
        kind, name, first = "resets", "openenv", server.held_out
        train = ResetTasks(first=first, seeds=server.seeds)
        if first:
            held_out = ResetTasks(seeds=first)
    else:
        return data
    update = {"train_sources": {name: AnyTaskSource.model_validate({kind: train})}}
    if held_out is not None and not (data.val_files or data.val_harbor_dir or data.val_sources):
        update["val_sources"] = {name: AnyTaskSource.model_validate({kind: held_out})}
    return data.model_copy(update=update)
