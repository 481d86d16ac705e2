"""Agent profiles: how a family of agents changes its message history (`profiles.yaml`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import resources
from typing import Literal, NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, field_validator

from proxy.errors import RequestError


class Rewrite(NamedTuple):
    """Example: Rewrite(re.compile("cd [^ ]+ && "), "")"""

    match: re.Pattern[str]
    text: str


class Removed(NamedTuple):
    """Example: Removed("Today is .*", "Today is Monday")"""

    pattern: str
    text: str


class AgentProfile(BaseModel):
    """One entry of `profiles.yaml`, or of the configuration's own profiles."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    history: Literal["keep", "follow"] = "keep"
    """`keep`: the prompt keeps what was sampled. `follow`: the prompt is what the agent sends."""
    scrub: tuple[re.Pattern[str], ...] = ()
    """Matches are removed from system messages because they change with every request."""
    agents: tuple[str, ...] = ()
    """Names of request headers that identify the sub-agent."""
    rewrites: tuple[Rewrite, ...] = ()
    """What the agent's client replaces in the strings of a call before it runs it, where no schema
    says so (`conversation.tidied`)."""
    stand_ins: tuple[str, ...] = ()
    """Names of tools under which the agent quotes a call that it could not make."""
    tolerate: Mapping[str, tuple[re.Pattern[str], ...]] = {}
    """Name → what may differ, in a branch, between a request and the recorded one. The name is a
    Python identifier."""

    @field_validator("agents")
    @classmethod
    def _lower(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name.lower() for name in names)

    @field_validator("tolerate")
    @classmethod
    def _named(
        cls, patterns: Mapping[str, tuple[re.Pattern[str], ...]]
    ) -> Mapping[str, tuple[re.Pattern[str], ...]]:
        wrong = [name for name in patterns if not name.isidentifier()]
        if wrong:
            raise ValueError(f"tolerate: {wrong[0]!r} is not a name; use letters and _")
        return patterns

    @property
    def follows(self) -> bool:
        return self.history == "follow"

    def scrubbed(self, text: str) -> tuple[str, list[Removed]]:
        """A system message's text without what `scrub` matches, and the matches."""
        removed = []
        for pattern in self.scrub:
            removed += [Removed(pattern.pattern, m[0]) for m in pattern.finditer(text) if m[0]]
            text = pattern.sub("", text)
        return text, removed


class Profiles:
    """All agent profiles by name: those of the package and those of the configuration."""

    def __init__(self, own: Mapping[str, AgentProfile]) -> None:
        """`own` are the configuration's profiles; they replace shipped ones of the same name."""
        shipped = yaml.safe_load(
            resources.files("proxy").joinpath("profiles.yaml").read_text(encoding="utf-8")
        )
        known = {name: AgentProfile.model_validate(entry) for name, entry in shipped.items()}
        self._profiles = {**known, **own}

    @property
    def names(self) -> list[str]:
        return list(self._profiles)

    def get(self, name: str) -> AgentProfile:
        """Raises RequestError for an unknown name."""
        profile = self._profiles.get(name)
        if profile is None:
            raise RequestError(
                f"profile: {name[:80]!r} is not known; use one of {', '.join(self._profiles)}",
                param="profile",
            )
        return profile
