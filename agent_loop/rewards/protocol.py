"""The interface of a reward source: it takes a finished trial, and returns a reward or raises.

Invariant: the value that a source returns is finite. *No reward* is None, never 0; a source that
cannot judge the trial raises `RewardError`, and the rollout is `failed`.
"""

from __future__ import annotations

from typing import Protocol

from agent_loop.records import FinishedTrial, Graded
from proxy.settings.section import Section


class RewardSource(Protocol):
    """Implementations: `verifier`, `grader`, `judge`, `reported`, `combined`; see `registry.py`."""

    async def grade(self, finished: FinishedTrial) -> Graded:
        """The reward of the trial; called once per trial.

        Raises:
            RewardError: the trial could not be judged.
        """
        ...

    async def close(self) -> None:
        """Ends the processes and connections of the source."""
        ...


class RewardConfig(Section):
    """The section of a reward source. Example: VerifierConfig(argv=("true",)).build()"""

    def build(self) -> RewardSource:
        """Raises ConfigurationError: these settings cannot work on this machine."""
        raise NotImplementedError


class JudgeSection(RewardConfig):
    """The section of a reward that a model gives."""

    policy: bool = False
    """The policy itself is the judge."""

    @property
    def served(self) -> Section | None:
        """The section of the engine that the run starts for the judge, with the keys of `engine`;
        None: it starts none."""
        return None
