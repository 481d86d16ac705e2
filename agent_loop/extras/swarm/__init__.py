"""Training with a swarm: clients without a GPU claim episodes, run any agent, and report rewards.

Example:
    from agent_loop.extras.swarm import SwarmClient
    swarm = SwarmClient("http://trainer:8100", token)
    episode = swarm.begin_episode(task_id="sum-17")
    ...                               # any agent, on episode.base_url with episode.api_key
    swarm.end_episode(episode, reward=1.0)

This package uses agent_loop, which does not import it. Clients: `client`, `client_texts`,
`joint_client`, `sync_client`, `cli`. Server: `serve`, `server`, `metrics`, `swarm`, `episodes`,
`admission`, `batching`, `table`. Trainer: `producer`. Between them: `wire`, `errors`, `token`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agent_loop.extras.swarm.client import AsyncSwarmClient
    from agent_loop.extras.swarm.errors import SwarmError
    from agent_loop.extras.swarm.joint_client import AsyncJointClient
    from agent_loop.extras.swarm.sync_client import JointClient, SwarmClient
    from agent_loop.extras.swarm.wire import Claimed, EngineState, EpisodeState, Status, TaskCounts

__all__ = [
    "AsyncJointClient",
    "AsyncSwarmClient",
    "Claimed",
    "EngineState",
    "EpisodeState",
    "JointClient",
    "Status",
    "SwarmClient",
    "SwarmError",
    "TaskCounts",
]

_MODULES = {
    "AsyncJointClient": "joint_client",
    "AsyncSwarmClient": "client",
    "JointClient": "sync_client",
    "SwarmClient": "sync_client",
    "SwarmError": "errors",
}


def __getattr__(name: str) -> object:
    """Imports a public name when it is first used, so that `agentic-swarm --help` is quick."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'wire')}"), name)
