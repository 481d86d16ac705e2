"""The agent loop's errors: one type per boundary. A failed trial is data, not a crash.

`remote_agent_loop` is the one place that catches them: each becomes a rollout that is `failed` and
carries the message. `ConfigurationError` (of the proxy) reports what is wrong before the first
trial starts.

AgentLoopError
├── LaunchError       the agent could not be started or watched: our side, not the agent's
├── RewardError       a verifier or grader did not give a usable reward (NaN, missing, crashed)
├── ChatError         a judge's model did not answer
├── BranchError       a branch did not replay the recorded turns with which it begins
├── LostAgentError    an agent crashed or ran out of time, and its trial can be continued
├── CreditError       a function of the user's own did not credit the turns
└── TrajectoryError   a recorded session is not a token tree (a missing log-probability, a gap)
ConfigurationError
└── TaskFileError     a task file cannot be read: file:line, what was found, what to do
"""

from __future__ import annotations

from proxy.errors import ConfigurationError


class AgentLoopError(Exception):
    """A trial or a batch could not be completed; the message is one line."""


class LaunchError(AgentLoopError):
    """The agent could not be started or watched."""


class RewardError(AgentLoopError):
    """A trial could not be judged."""


class ChatError(AgentLoopError):
    """A model behind an endpoint did not answer."""


class BranchError(AgentLoopError):
    """A branch did not replay the recorded turns with which it begins."""


class LostAgentError(AgentLoopError):
    """An agent crashed or ran out of time, and its trial can be continued."""


class CreditError(AgentLoopError):
    """A function of the user's own did not credit the turns of a trial."""


class TrajectoryError(AgentLoopError):
    """A recorded session is not a tree of sampled tokens."""


class TaskFileError(ConfigurationError):
    """A task file cannot be read: file and line, what was found, what to do."""
