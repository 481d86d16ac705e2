"""Training by a swarm: clients without a GPU claim episodes, run any agent, report the reward.

from agent_loop.swarm import SwarmClient
swarm = SwarmClient("http://trainer:8100", token)
episode = swarm.begin_episode(task_id="sum-17")
...                                   # any agent, on episode.base_url with episode.api_key
swarm.end_episode(episode, reward=1.0)
"""

from agent_loop.swarm.client import AsyncSwarmClient
from agent_loop.swarm.errors import SwarmError
from agent_loop.swarm.joint_client import AsyncJointClient, JointClient
from agent_loop.swarm.sync_client import SwarmClient
from agent_loop.swarm.wire import Claimed, EngineState, EpisodeState, Status

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
]
