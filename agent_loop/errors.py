"""The agent loop's errors: one type per boundary. A failed trial is data, not a crash.

Caught once, in `remote_agent_loop`, where each becomes a rollout that is `failed` and says why;
`ConfigurationError` (of the proxy) is for what can be known before the first trial starts.

AgentLoopError
├── LaunchError       the agent could not be started or watched: our side, not the agent's
├── RewardError       a verifier or grader did not give a usable reward (NaN, missing, crashed)
└── TrajectoryError   a recorded session is not a token tree (a missing log-probability, a gap)
ConfigurationError
└── TaskFileError     a task file cannot be read: file:line, what was found, what to do
"""

from __future__ import annotations

from proxy.errors import ConfigurationError


class AgentLoopError(Exception):
    pass


class LaunchError(AgentLoopError):
    pass


class RewardError(AgentLoopError):
    pass


class TrajectoryError(AgentLoopError):
    pass


class TaskFileError(ConfigurationError):
    pass
