"""Trials of agents: tasks in, rollouts out. A public name is loaded when it is used."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agent_loop.records import Group as Group
    from agent_loop.records import Rollout as Rollout
    from agent_loop.records import Task as Task
    from agent_loop.records import Trajectory as Trajectory
    from agent_loop.remote_agent_loop import RemoteAgentLoop as RemoteAgentLoop

    __version__: str

_MODULES = {
    "Group": "agent_loop.records",
    "RemoteAgentLoop": "agent_loop.remote_agent_loop",
    "Rollout": "agent_loop.records",
    "Task": "agent_loop.records",
    "Trajectory": "agent_loop.records",
}
__all__ = [
    "Group",
    "RemoteAgentLoop",
    "Rollout",
    "Task",
    "Trajectory",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Loads a public name. Raises AttributeError for any other name."""
    if name == "__version__":
        from importlib.metadata import version

        return version("agentic-rl")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)
