"""The interface of a reward source: it takes a finished trial, and returns a reward or raises.

Invariant: the value that a source returns is finite. *No reward* is None, never 0; a source that
cannot judge the trial raises `RewardError`, and the rollout is `failed`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from pydantic import Field

from agent_loop.records import FinishedTrial, Graded
from agent_loop.reward_values import RewardKey
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


class RewardTimeout(RewardConfig):
    """What the sections of a verifier, a grader and a judge have in common."""

    timeout_s: float = Field(120.0, gt=0)
    """Seconds that the verifier, a call of the grader, or one answer of the judge may take."""


class OwnRewardConfig(RewardKey, RewardTimeout):
    """What the sections of a verifier and a grader have in common."""

    pass_env: tuple[str, ...] = ()
    """Names of variables of the trainer's own environment that the verifier or grader gets, too;
    the agent does not get them."""
    show: tuple[Path, ...] = ()
    """Files and folders that the verifier or grader reads, and that `argv` and `env` do not name.
    What its Python scripts, or its module, import from their own folder is found."""

    @property
    def files(self) -> tuple[Path, ...]:
        """The files of the source itself, which agents do not see."""
        return ()


class JudgeSection(RewardTimeout):
    """The section of a reward that a model gives."""

    @property
    def is_policy(self) -> bool:
        """Whether the policy itself is the judge."""
        return False

    @property
    def served(self) -> Section | None:
        """The section of the engine that the run starts for the judge, with the keys of `engine`;
        None: it starts none."""
        return None
