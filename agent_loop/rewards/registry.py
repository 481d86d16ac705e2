"""Every reward source, by its key under `remote_agent`.

To add a reward, write a module with its section (a `RewardConfig`) and its class, and add a field
here; if it is an extra, the field names the class of its section. A reward outside this package
needs no field: name it in `remote_agent.reward`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from agent_loop.rewards.combined import CombinedReward, Weighted
from agent_loop.rewards.protocol import JudgeSection, OwnRewardConfig, RewardConfig, RewardSource
from agent_loop.rewards.reported import LauncherReward, PostedReward
from agent_loop.rewards.verifier import VerifierConfig
from proxy.errors import ConfigurationError
from proxy.settings.late_section import LateSection
from proxy.settings.outside_part import OutsidePart
from proxy.settings.section import Section


class OutsideReward(OutsidePart, RewardConfig):
    """A reward source of your own, named by the class of its section."""

    kind = "reward_source"

    def build(self) -> RewardSource:
        return self.section(RewardConfig).build()


class RewardsConfig(Section):
    """Where a trial's reward comes from. If no source is configured, it comes from the launcher:
    the function's return value, or Harbor's verifier.

    Example: RewardsConfig(verifier=VerifierConfig(argv=("true",))).build_rewards()
    """

    verifier: VerifierConfig | None = None
    """Reward from a program that runs in the trial's working directory after the agent has
    ended."""
    grader: Annotated[
        OwnRewardConfig | None, LateSection("agent_loop.rewards.grader:GraderConfig")
    ] = None
    """Reward from a Python function."""
    judge: Annotated[
        JudgeSection | None, LateSection("agent_loop.extras.judge.reward:JudgeConfig")
    ] = None
    """Reward from a language model."""
    reward: OutsideReward | None = None
    """Reward from a source of your own: `reward.target` names the class of its section."""
    posted_rewards: bool = False
    """Reward that was posted to the session (`POST /sessions/{id}/rewards`)."""
    reward_weights: Mapping[str, float] = Field(default_factory=dict)
    """Several sources are summed with these weights, by key (`posted` for `posted_rewards`); the
    default weight is 1."""

    def build_rewards(self) -> RewardSource:
        """The configured source, or the weighted sum of several.

        Raises:
            ConfigurationError: a source refuses its settings, or a weight names no source.
        """
        sources = {name: value.build() for name, value in self if isinstance(value, RewardConfig)}
        if self.posted_rewards:
            sources["posted"] = PostedReward()
        unknown = sorted(self.reward_weights.keys() - sources.keys())
        if unknown:
            raise ConfigurationError(
                f"remote_agent.reward_weights: {unknown} is not configured; the configured sources "
                f"are {list(sources)}"
            )
        if not sources:
            return LauncherReward()
        if len(sources) == 1 and not self.reward_weights:
            return next(iter(sources.values()))
        weights = self.reward_weights
        return CombinedReward({n: Weighted(s, weights.get(n, 1.0)) for n, s in sources.items()})
